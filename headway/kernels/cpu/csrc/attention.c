/* paged_attention: one pass over the keys with an online softmax, 32 keys at a time.
 *
 * An item is one key/value head of one row with up to MAX_VECTORS of its query vectors (queries x query heads of the group), so
 * that keys and values are read once for the whole group. Rows with one query are cut into chunks of CHUNK keys whose partial
 * results are merged at the end; the cut depends on the row alone, so a row's result does not depend on its neighbours in
 * the batch, nor on the number of threads.
 */
#include "calls.h"
#include "transpose.h"

#define KEYS 32
#define CHUNK 128
#define KEY_PAIRS (BF_DOT && LANES == 16) /* bfloat16 queries and keys are multiplied as pairs, else as floats */
#define MAX_VECTORS 48
#define PARTS (KEYS / LANES) /* vectors that hold a number for each of the keys */
#define TILE (LANES == 16 ? 4 : 3) /* query vectors whose sums stay in registers */
#define ALIGNED __attribute__((aligned(64)))

struct attention {
    const void *q, *k_cache, *v_cache;
    const int32_t *tables, *row_slots, *query_start, *seq_lens;
    void *out;
    float *partials;
    const struct item *items;
    int64_t tokens, rows, slots, table_size, blocks, block_shift, heads, kv_heads, size;
    int64_t padded; /* size rounded up to whole vectors of floats */
    int64_t words;  /* 4-byte words of a head in `q` and `keys`: pairs of bfloat16 (KEY_PAIRS) or floats */
    float scale, soft_cap;
    int64_t window, chunk;
    const float *sinks, *slopes; /* by head, or NULL */
    int bf;
};

/* Queries [q0, q1) of a row (counted from its first token `first`, which sits at position `past`), keys [k0, k1).
 * partial < 0: the item gives the whole answer. */
struct item {
    int64_t row, head, first, past, q0, q1, k0, k1, partial;
};

/* Where the key (or value) of each of 32 positions lies; -1 outside [k0, k1). An invalid block id reads block 0.
 * Blocks hold at least 8 tokens, so 8 neighbours share one. */
INLINE void locate(const struct attention *a, const struct item *it, int64_t position, int64_t at[KEYS], vi usable[PARTS]) {
    const int32_t *table = a->tables + (int64_t)a->row_slots[it->row] * a->table_size;
    const int64_t stride = a->kv_heads * a->size;
    int32_t usable_at[KEYS] ALIGNED;
    for (int64_t j = 0; j < KEYS; j += 8) {
        const int64_t p = position + j, index = p >> a->block_shift;
        int64_t block = index < a->table_size ? table[index] : 0;
        if (block < 0 || block >= a->blocks) block = 0;
        const int64_t token = (block << a->block_shift) + (p & ((1 << a->block_shift) - 1));
        for (int64_t i = 0; i < 8; i++) {
            const int inside = p + i >= it->k0 && p + i < it->k1;
            at[j + i] = inside ? (token + i) * stride + it->head * a->size : -1;
            usable_at[j + i] = -inside;
        }
    }
    memcpy(usable, usable_at, sizeof usable_at);
}

/* Blocks lie anywhere in memory and a head's rows are apart, so the hardware does not see the next one coming. */
INLINE void fetch(const void *cache, const int64_t at[KEYS], int64_t bytes, const int bf) {
    for (int j = 0; j < KEYS; j++)
        if (at[j] >= 0)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)cache + at[j] * (bf ? 2 : 4) + b, 0, 3);
}

/* keys [words, 32] <- the 32 keys, turned; absent ones are zero. */
INLINE void turn_keys(const struct attention *a, const int64_t at[KEYS], uint32_t *keys, const int bf) {
    const int pairs = bf && KEY_PAIRS;
    const int64_t unit = bf ? 2 : 4, per_word = pairs ? 2 : 1;
    const int all = at[0] >= 0 && at[KEYS - 1] >= 0; /* the range of keys has no holes */
    for (int64_t w = 0; w < a->words; w += LANES)
        for (int part = 0; part < KEYS; part += LANES) {
            const int64_t left = a->size - w * per_word;
            vf r[LANES];
            if (all && left >= LANES * per_word) {
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) {
                    const char *from = (const char *)a->k_cache + (at[part + j] + w * per_word) * unit;
                    r[j] = load(from, 0, bf && !pairs);
                }
            } else {
                for (int j = 0; j < LANES; j++) {
                    r[j] = (vf){0};
                    if (at[part + j] < 0) continue;
                    const char *from = (const char *)a->k_cache + (at[part + j] + w * per_word) * unit;
                    if (!pairs) r[j] = load_row(from, 0, left, bf);
                    else memcpy(&r[j], from, left < LANES * 2 ? left * 2 : LANES * 4);
                }
            }
            transpose(r);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) store(keys, (w + j) * KEYS + part, r[j], 0);
        }
}

/* q [stride] <- one query vector, in the form of the keys. */
INLINE void take_query(const struct attention *a, int64_t head, uint32_t *q, const int bf) {
    if (bf && !KEY_PAIRS) {
        for (int64_t i = 0; i < a->size; i += LANES)
            store_row(q, i, load_row(a->q, head * a->size + i, a->size - i, 1), a->size - i, 0);
        return;
    }
    q[a->words - 1] = 0; /* an odd number of bfloat16 leaves half a word */
    memcpy(q, (const char *)a->q + head * a->size * (bf ? 2 : 4), a->size * (bf ? 2 : 4));
}

/* scores [m, 32] = q [m, stride] . keys [words, 32] */
INLINE void dot_keys(const int m, const uint32_t *q, int64_t stride, int64_t words, const uint32_t *keys, float *scores,
                     const int bf) {
    vf acc[TILE][PARTS] = {{{0}}};
    for (int64_t w = 0; w < words; w++)
#pragma GCC unroll 8
        for (int c = 0; c < PARTS; c++) {
            const vu k = (vu)load(keys, w * KEYS + c * LANES, 0);
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) acc[i][c] = multiply_add(acc[i][c], k, q + i * stride + w, bf && KEY_PAIRS);
        }
#pragma GCC unroll 4
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int c = 0; c < PARTS; c++) store(scores, i * KEYS + c * LANES, acc[i][c], 0);
}

#if LANES < 16
#define FEW 12 /* query vectors for which turning the keys costs more than it saves */

/* The sums of four vectors. */
INLINE void sum_four(vf a, vf b, vf c, vf d, float *to) {
#if LANES == 8
    const vf ab = PAIR(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + PAIR(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const vf cd = PAIR(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + PAIR(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    vf all = PAIR(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + PAIR(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    all += PAIR(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#else
    const vf ab = PAIR(a, b, 0, 4, 2, 6) + PAIR(a, b, 1, 5, 3, 7), cd = PAIR(c, d, 0, 4, 2, 6) + PAIR(c, d, 1, 5, 3, 7);
    const vf all = PAIR(ab, cd, 0, 1, 4, 5) + PAIR(ab, cd, 2, 3, 6, 7);
#endif
    memcpy(to, &all, 16);
}

/* scores [m, 32] = q [m, stride] . keys, as they lie in the cache; those of absent keys are anything. */
INLINE void dot_cached(const int m, const struct attention *a, const float *q, int64_t stride, const int64_t at[KEYS],
                       float *scores, const int bf) {
    for (int j = 0; j < KEYS; j += 4) {
        vf acc[TILE][4] = {{{0}}};
        int64_t key[4];
        for (int c = 0; c < 4; c++) key[c] = at[j + c] < 0 ? 0 : at[j + c];
        for (int64_t d = 0; d < a->size; d += LANES) {
            vf x[TILE];
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) x[i] = load_row(q, i * stride + d, a->size - d, 0);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const vf k = load_row(a->k_cache, key[c] + d, a->size - d, bf);
#pragma GCC unroll 4
                for (int i = 0; i < m; i++) acc[i][c] += k * x[i];
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < m; i++) sum_four(acc[i][0], acc[i][1], acc[i][2], acc[i][3], scores + i * KEYS + j);
    }
}
#else
#define FEW 0
INLINE void dot_cached(const int m, const struct attention *a, const float *q, int64_t stride, const int64_t at[KEYS],
                       float *scores, const int bf) {
    (void)m, (void)a, (void)q, (void)stride, (void)at, (void)scores, (void)bf;
}
#endif

/* out [m, padded] += probabilities [m, 32] . values, for n vectors of the head from element d. */
INLINE void add_values(const int m, const int n, const struct attention *a, const int64_t at[KEYS], const float *probs,
                       int64_t d, float *out, const int bf) {
    vf acc[TILE][4];
#pragma GCC unroll 4
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int c = 0; c < n; c++) acc[i][c] = load(out, i * a->padded + d + c * LANES, 0);
    for (int j = 0; j < KEYS; j++) {
        if (at[j] < 0) continue;
#pragma GCC unroll 4
        for (int c = 0; c < n; c++) {
            const vf v = n == 1 ? load_row(a->v_cache, at[j] + d, a->size - d, bf) : load(a->v_cache, at[j] + d + c * LANES, bf);
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) acc[i][c] += v * probs[i * KEYS + j];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int c = 0; c < n; c++) store(out, i * a->padded + d + c * LANES, acc[i][c], 0);
}

INLINE void add_all_values(const int m, const struct attention *a, const int64_t at[KEYS], const float *probs, float *out,
                           const int bf) {
    int64_t d = 0;
    for (; d + 4 * LANES <= a->size; d += 4 * LANES) add_values(m, 4, a, at, probs, d, out, bf);
    for (; d < a->size; d += LANES) add_values(m, 1, a, at, probs, d, out, bf);
}

/* The first position that a query sees. */
INLINE int64_t lowest(const struct attention *a, int64_t query) {
    if (a->chunk > 0) return query < 0 ? 0 : query / a->chunk * a->chunk;
    return a->window > 0 && query >= a->window ? query - a->window + 1 : 0;
}

/* The weight of a head's sink relative to `top`, which is -inf where no key was seen. */
INLINE float sink_weight(const struct attention *a, int64_t head, float top) {
    return a->sinks && top != -INFINITY ? expf(a->sinks[head] - top) : 0.0f;
}

/* Scores become probabilities relative to the running maximum; sums and outputs so far are brought to the new one. */
INLINE void soften(const struct attention *a, float *scores, int64_t position, int64_t query, int64_t head,
                   const vi usable[PARTS], float *top, float *total, float *out) {
    const int32_t last = (int32_t)(query - position), first = (int32_t)(lowest(a, query) - position) - 1;
    vf s[PARTS], high = splat(-INFINITY), sums = {0};
    for (int c = 0; c < PARTS; c++) {
        s[c] = load(scores, c * LANES, 0) * a->scale;
        if (a->soft_cap > 0) s[c] = a->soft_cap * vtanh(s[c] / a->soft_cap);
        const vi key = (vi){IOTA} + c * LANES;
        if (a->slopes) s[c] += a->slopes[head] * __builtin_convertvector(key - last, vf);
        s[c] = choose(usable[c] & (key <= last) & (key > first), s[c], splat(-INFINITY));
        high = vmax(s[c], high);
    }
    const float top_here = max_lane(high);
    const float now = top_here <= *top ? *top : top_here; /* NaN scores stay seen */
    if (now == -INFINITY) {
        memset(scores, 0, KEYS * sizeof *scores);
        return;
    }
    for (int c = 0; c < PARTS; c++) {
        const vf p = vexp(s[c] - now);
        store(scores, c * LANES, p, 0);
        sums += p;
    }
    if (now > *top) {
        const float shrink = *top == -INFINITY ? 0.0f : expf(*top - now);
        *total *= shrink;
        for (int64_t d = 0; d < a->padded; d += LANES) store(out, d, load(out, d, 0) * shrink, 0);
        *top = now;
    }
    *total += sum(sums);
}

/* One item: q and out are [vectors, padded], top and total [vectors]. */
INLINE void attend(const struct attention *a, const struct item *it, float *work, const int bf) {
    const int64_t group = a->heads / a->kv_heads, vectors = (it->q1 - it->q0) * group, padded = a->padded;
    const int64_t stride = (a->words + LANES - 1) / LANES * LANES, bytes = a->size * (bf ? 2 : 4);
    const int few = vectors <= FEW;
    uint32_t *q = (uint32_t *)work, *keys = q + vectors * stride;
    float *out = (float *)(keys + stride * KEYS), *scores = out + vectors * padded;
    float *top = scores + vectors * KEYS, *total = top + vectors;
    for (int64_t i = 0; i < vectors; i++) {
        const int64_t head = (it->first + it->q0 + i / group) * a->heads + it->head * group + i % group;
        take_query(a, head, q + i * stride, bf);
        memset(out + i * padded, 0, padded * 4);
        top[i] = -INFINITY;
        total[i] = 0;
    }
    int64_t position = it->k0 / KEYS * KEYS, at[KEYS], next[KEYS], i;
    vi usable[PARTS], next_usable[PARTS];
    locate(a, it, position, next, next_usable);
    fetch(a->k_cache, next, bytes, bf);
    fetch(a->v_cache, next, bytes, bf);
    for (; position < it->k1; position += KEYS) {
        memcpy(at, next, sizeof at);
        memcpy(usable, next_usable, sizeof usable);
        locate(a, it, position + KEYS, next, next_usable);
        fetch(a->k_cache, next, bytes, bf);
        fetch(a->v_cache, next, bytes, bf);
        if (!few) turn_keys(a, at, keys, bf);
        for (i = 0; i < vectors; i += TILE) {
            const uint32_t *at_q = q + i * stride;
            float *to = scores + i * KEYS;
            switch (few ? least(vectors - i, TILE) : -least(vectors - i, TILE)) {
            case 1: dot_cached(1, a, (const float *)at_q, stride, at, to, bf); break;
            case 2: dot_cached(2, a, (const float *)at_q, stride, at, to, bf); break;
            case 3: dot_cached(3, a, (const float *)at_q, stride, at, to, bf); break;
            case -1: dot_keys(1, at_q, stride, a->words, keys, to, bf); break;
            case -2: dot_keys(2, at_q, stride, a->words, keys, to, bf); break;
            case -3: dot_keys(3, at_q, stride, a->words, keys, to, bf); break;
            case -4: dot_keys(TILE == 4 ? 4 : 1, at_q, stride, a->words, keys, to, bf);
            }
        }
        for (i = 0; i < vectors; i++)
            soften(a, scores + i * KEYS, position, it->past + it->q0 + i / group, it->head * group + i % group, usable, top + i,
                   total + i, out + i * padded);
        for (i = 0; i + TILE <= vectors; i += TILE) add_all_values(TILE, a, at, scores + i * KEYS, out + i * padded, bf);
        switch (vectors - i) {
        case 3: add_all_values(3 < TILE ? 3 : 1, a, at, scores + i * KEYS, out + i * padded, bf); break;
        case 2: add_all_values(2, a, at, scores + i * KEYS, out + i * padded, bf); break;
        case 1: add_all_values(1, a, at, scores + i * KEYS, out + i * padded, bf);
        }
    }
    for (int64_t i = 0; i < vectors; i++) {
        if (it->partial >= 0) {
            float *to = a->partials + (it->partial * group + i) * (padded + 2);
            memcpy(to + 2, out + i * padded, padded * 4);
            to[0] = top[i];
            to[1] = total[i];
            continue;
        }
        const int64_t head = (it->first + it->q0 + i / group) * a->heads + it->head * group + i % group;
        const float all = total[i] + sink_weight(a, it->head * group + i % group, top[i]);
        const float inverse = total[i] > 0 ? 1.0f / all : total[i]; /* no key: zeros; NaN stays NaN */
        for (int64_t d = 0; d < a->size; d += LANES)
            store_row(a->out, head * a->size + d, load(out, i * padded + d, 0) * inverse, a->size - d, bf);
    }
}

static void attend_f32(const struct attention *a, const struct item *it, float *work) { attend(a, it, work, 0); }
static void attend_bf16(const struct attention *a, const struct item *it, float *work) { attend(a, it, work, 1); }

static void attention_item(void *context, int64_t index) {
    const struct attention *a = context;
    const struct item *it = a->items + index;
    const int64_t vectors = (it->q1 - it->q0) * (a->heads / a->kv_heads);
    const int64_t floats = 2 * vectors * a->padded + a->padded * KEYS + vectors * (KEYS + 2); /* bfloat16 needs less */
    float local[8192] ALIGNED;
    float *work = floats <= 8192 ? local : aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
    (a->bf ? attend_bf16 : attend_f32)(a, it, work);
    if (work != local) free(work);
}

/* The chunks of one row and head, whose first partial result is `it->partial`, become its output. */
static void merge(const struct attention *a, const struct item *it, int64_t chunks) {
    const int64_t group = a->heads / a->kv_heads, stride = a->padded + 2;
    for (int64_t g = 0; g < group; g++) {
        const float *part = a->partials + (it->partial * group + g) * stride;
        const int64_t base = (it->first * a->heads + it->head * group + g) * a->size;
        float top = -INFINITY, total = 0;
        for (int64_t c = 0; c < chunks; c++) top = part[c * group * stride] > top ? part[c * group * stride] : top;
        for (int64_t d = 0; d < a->size; d += LANES) {
            vf sums = {0};
            total = 0;
            for (int64_t c = 0; c < chunks; c++) {
                const float *p = part + c * group * stride;
                const float weight = p[0] == -INFINITY ? 0.0f : expf(p[0] - top);
                total += p[1] * weight;
                sums += load(p, 2 + d, 0) * weight;
            }
            const float inverse = total > 0 ? 1.0f / (total + sink_weight(a, it->head * group + g, top)) : total;
            store_row(a->out, base + d, sums * inverse, a->size - d, a->bf);
        }
    }
}

/* Context of a row, no longer than its block table reaches. */
static int64_t context_length(const struct attention *a, int64_t r) {
    const int64_t reach = a->table_size << a->block_shift;
    return a->seq_lens[r] < reach ? a->seq_lens[r] : reach;
}

/* The items of row r, appended to `items` (NULL: only counted). Rows without context or with an invalid slot have none. */
static int64_t row_items(const struct attention *a, int64_t r, struct item *items, int64_t *partials) {
    const int64_t group = a->heads / a->kv_heads, length = context_length(a, r), slot = a->row_slots[r];
    const int64_t first = a->query_start[r], end = a->query_start[r + 1], queries = end - first;
    int64_t n = 0, span = MAX_VECTORS / group ? MAX_VECTORS / group : 1;
    if (slot < 0 || slot >= a->slots || length <= 0 || first < 0 || end > a->tokens || queries <= 0) return 0;
    for (int64_t head = 0; head < a->kv_heads; head++)
        for (int64_t q0 = 0; q0 < queries; q0 += span) {
            const int64_t q1 = q0 + span < queries ? q0 + span : queries, past = length - queries;
            int64_t k0 = lowest(a, past + q0), k1 = past + q1;
            if (k1 < k0) k1 = k0;
            const int64_t chunks = queries == 1 && k1 - k0 > CHUNK ? (k1 - k0 + CHUNK - 1) / CHUNK : 1;
            for (int64_t c = 0; c < chunks; c++, n++) {
                if (!items) continue;
                const int64_t c1 = k0 + (c + 1) * CHUNK < k1 ? k0 + (c + 1) * CHUNK : k1;
                items[n] = (struct item){r, head, first, past, q0, q1, k0 + c * CHUNK, chunks > 1 ? c1 : k1,
                                         chunks > 1 ? (*partials)++ : -1};
            }
        }
    return n;
}

static void zero_unowned(const struct attention *a) {
    const int64_t bytes = a->heads * a->size * (a->bf ? 2 : 4);
    int64_t done = 0; /* tokens [0, done) have an owner or are zeroed */
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t first = a->query_start[r], end = a->query_start[r + 1];
        if (!row_items(a, r, NULL, NULL)) continue;
        if (first > done) memset((char *)a->out + done * bytes, 0, (first - done) * bytes);
        if (end > done) done = end;
    }
    if (a->tokens > done) memset((char *)a->out + done * bytes, 0, (a->tokens - done) * bytes);
}

/* Shapes as in the operation; returns 0, or -1 without memory. */
EXPORT int headway_paged_attention(const void *q, const void *k_cache, const void *v_cache, const int32_t *tables,
                                   const int32_t *row_slots, const int32_t *query_start, const int32_t *seq_lens, void *out,
                                   int64_t tokens, int64_t rows, int64_t slots, int64_t table_size, int64_t blocks,
                                   int64_t block_size, int64_t heads, int64_t kv_heads, int64_t size, float scale,
                                   int64_t window, float soft_cap, int64_t chunk, const float *sinks, const float *slopes,
                                   int bf, int threads) {
    struct attention a = {q, k_cache, v_cache, tables, row_slots, query_start, seq_lens, out, NULL, NULL, tokens, rows, slots,
                          table_size, blocks, __builtin_ctzll((uint64_t)block_size), heads, kv_heads, size,
                          (size + LANES - 1) / LANES * LANES, bf && KEY_PAIRS ? (size + 1) / 2 : size, scale, soft_cap, window,
                          chunk, sinks, slopes, bf};
    int64_t count = 0, filled = 0, partials = 0, work = 0;
    zero_unowned(&a);
    for (int64_t r = 0; r < rows; r++) count += row_items(&a, r, NULL, NULL);
    if (!count) return 0;
    struct item *items = malloc(count * sizeof *items);
    if (!items) return -1;
    for (int64_t r = 0; r < rows; r++) filled += row_items(&a, r, items + filled, &partials);
    a.items = items;
    if (partials && !(a.partials = malloc(partials * (heads / kv_heads) * (a.padded + 2) * 4))) {
        free(items);
        return -1;
    }
    for (int64_t i = 0; i < count; i++) work += (items[i].q1 - items[i].q0) * (items[i].k1 - items[i].k0 + 16);
    parallel_for(count, work * (heads / kv_heads) * size < 32768 ? 1 : threads, attention_item, &a);
    for (int64_t i = 0, chunks = 1; i < count; i += chunks, chunks = 1) {
        if (items[i].partial < 0) continue;
        while (i + chunks < count && items[i + chunks].partial >= 0 && items[i + chunks].head == items[i].head &&
               items[i + chunks].row == items[i].row)
            chunks++;
        merge(&a, items + i, chunks);
    }
    free(items);
    free(a.partials);
    return 0;
}
