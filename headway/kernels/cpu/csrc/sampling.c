/* sample: filters become one threshold per row, then the tokens at or above it race. */
#include "select.h"

#define MIN_ELEMENTS 65536 /* less than this is done before a second thread has woken up */
#define MIN_READ 1048576   /* the same, for a greedy batch, which costs little more than reading it */
#define MIN_CHUNK 8192
enum { FLAG_RANDOM = 1, FLAG_TOP = 2, FLAG_MIN_P = 4 };

struct winner {
    float score;
    int32_t token;
};

struct sample {
    const char *logits;
    const int32_t *slots, *top_k, *seeds, *num_tokens;
    const float *temperature, *top_p, *min_p;
    int64_t stride_bytes, vocab, num_slots, chunk, chunks;
    float greedy_eps;
    int flags, bf, failed;
    float *bounds;
    struct winner *winners;
};

/* lowbias32 and the keys of a row: kernels/sample/rng.py, bit for bit. */
#define MIX(x)                                  \
    do {                                        \
        x = (x ^ (x >> 16)) * 0x7feb352du;      \
        x = (x ^ (x >> 15)) * 0x846ca68bu;      \
        x = x ^ (x >> 16);                      \
    } while (0)

INLINE uint32_t chain(uint32_t a, uint32_t b, uint32_t c) {
    MIX(a);
    a ^= b;
    MIX(a);
    a += c;
    MIX(a);
    return a;
}

INLINE vu token_bits(vu token, uint32_t first, uint32_t second) {
    vu x = (token * 0x9e3779b1u) ^ first;
    x = (x ^ (x >> 16)) * 0x21f0aaadu + second;
    MIX(x);
    return x;
}

/* log(1 + f) + exponent * ln2 for 1 + f in [sqrt(1/2), sqrt(2)]: f - f^2/2 + f^3 p(f), p a minimax polynomial. */
INLINE vf log_parts(vf f, vf exponent) {
    vf p = -0.0763443f * f + 0.127615497f;
    p = p * f - 0.131601945f;
    p = p * f + 0.142017618f;
    p = p * f - 0.166233569f;
    p = p * f + 0.200012267f;
    p = p * f - 0.250008225f;
    p = p * f + 0.333333313f;
    vf square = f * f;
    vf low = p * f * square - exponent * 2.12194440e-4f - 0.5f * square;
    return f + low + exponent * 0.693359375f;
}

/* x = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)), for normal x > 0. */
INLINE vf split(vf x, vf *exponent) {
    const vi bits = (vi)x, n = (bits - 0x3f3504f3) >> 23;
    *exponent = __builtin_convertvector(n, vf);
    return (vf)(bits - (n << 23));
}

/* log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32, clamped below 1. Where 1 - u rounds, u is small and serves itself. */
INLINE vf log_exponential(vu bits) {
    const float below_one = 1.0f - 0x1p-24f;
    vf u = (__builtin_convertvector(bits, vf) + 0.5f) * 0x1p-32f, n;
    u = choose(u > below_one, splat(below_one), u);
    const vf mantissa = split(1.0f - u, &n);
    const vf exponential = -log_parts(choose(n == 0.0f, -u, mantissa - 1.0f), n);
    const vf again = split(exponential, &n);
    return log_parts(again - 1.0f, n);
}

struct race {
    float bound;
    uint32_t first, second;
};

/* The best of tokens begin..end, the lowest on ties. */
INLINE struct winner race(const struct row *row, const struct race *r, int64_t begin, int64_t end, const int random,
                          const int filter, const int bf) {
    vf best = splat(-INFINITY);
    vi winner = {0}, token = {IOTA};
    token += (int32_t)begin;
    for (int64_t i = begin; i < end; i += LANES, token += LANES) {
        vf x = load_logits(row->logits, i, end - i, bf);
        if (random) x = x / row->heat;
        if (filter) {
            const vi keep = x >= r->bound;
            if (!any(keep)) continue;
            x = choose(keep, x, splat(-INFINITY));
        }
        if (random) x = x - log_exponential(token_bits((vu)token, r->first, r->second));
        const vi better = x > best;
        best = choose(better, x, best);
        winner = (token & better) | (winner & ~better);
    }
    struct winner won = {-INFINITY, 0};
    for (int lane = 0; lane < LANES; lane++)
        if (best[lane] > won.score || (best[lane] == won.score && winner[lane] < won.token))
            won = (struct winner){best[lane], winner[lane]};
    return won;
}

INLINE struct winner race_as(const struct row *row, const struct race *r, int64_t begin, int64_t end, int random,
                             const int bf) {
    if (!random) return race(row, r, begin, end, 0, 0, bf);
    if (r->bound > -INFINITY) return race(row, r, begin, end, 1, 1, bf);
    return race(row, r, begin, end, 1, 0, bf);
}

static int is_random(const struct sample *a, int64_t slot) {
    return (a->flags & FLAG_RANDOM) && a->temperature[slot] >= a->greedy_eps;
}

static struct row row_of(const struct sample *a, int64_t r, int64_t slot) {
    return (struct row){a->logits + r * a->stride_bytes, a->vocab, a->temperature[slot], a->bf};
}

static void race_item(void *context, int64_t item) {
    const struct sample *a = context;
    const int64_t r = item / a->chunks, begin = item % a->chunks * a->chunk, slot = a->slots[r];
    const int64_t end = begin + a->chunk < a->vocab ? begin + a->chunk : a->vocab;
    a->winners[item] = (struct winner){-INFINITY, 0};
    if (slot < 0 || slot >= a->num_slots) return;
    const struct row row = row_of(a, r, slot);
    const uint32_t low = (uint32_t)a->seeds[2 * slot], high = (uint32_t)a->seeds[2 * slot + 1];
    const uint32_t position = (uint32_t)a->num_tokens[slot];
    const struct race keys = {a->bounds[r], chain(low + 0x9e3779b9u, high, position),
                              chain(position + 0x85ebca6bu, high, low)};
    a->winners[item] = a->bf ? race_as(&row, &keys, begin, end, is_random(a, slot), 1)
                             : race_as(&row, &keys, begin, end, is_random(a, slot), 0);
}

/* Weights of x [size] into weights, 0 below floor; returns their sum. */
static double weigh(const float *x, int64_t size, float top, float floor, float *weights) {
    double total = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const vf v = load_logits(x, i, left, 0);
        const vf weight = choose(v >= floor, weight_below(v, top), (vf){0});
        store_row(weights, i, weight, left, 0);
        total += sum_wide(weight);
    }
    return total;
}

INLINE double mass_of(const struct row *row, float top, float floor, const int bf) {
    struct wide total = {{0}, {0}};
    for (int64_t i = 0; i < row->vocab; i += LANES) {
        const vf x = load_logits(row->logits, i, row->vocab - i, bf) / row->heat;
        total = add_wide(total, choose(x >= floor, weight_below(x, top), (vf){0}));
    }
    return total_wide(total);
}

/* The largest t with mass{x >= t} >= p * mass, over x >= floor. buffer [2 * buffer_size]; `found` elements of it are known to
 * hold all x >= floor, or found < 0: then they are collected here. */
static float nucleus(const struct row *row, float p, float top, float floor, float *buffer, int64_t found) {
    if (!(p > 0) || top == INFINITY || floor > top) return top;
    float *weights = buffer + buffer_size(row->vocab);
    if (found >= 0) {
        const double total = weigh(buffer, found, top, floor, weights);
        return select_mass(buffer, weights, found, p * total);
    }
    /* All tokens below `low` together weigh less than (1 - p) / 2, and the heaviest token alone 1. */
    const float low = top + logf((1.0f - p) / 2 / (float)row->vocab);
    const double total = row->bf ? mass_of(row, top, floor, 1) : mass_of(row, top, floor, 0);
    found = row_collect(row, low > floor ? low : floor, buffer);
    weigh(buffer, found, top, floor, weights);
    return select_mass(buffer, weights, found, p * total);
}

/* The least x that all filters keep. */
static float bound_of(const struct row *row, int64_t k, float p, float min_p, float *buffer) {
    const int by_k = k > 0 && k < row->vocab;
    float *strips = by_k ? buffer + 2 * buffer_size(row->vocab) : NULL, floor = -INFINITY;
    const float top = row_top(row, strips);
    int64_t found = -1;
    if (top == -INFINITY) return -INFINITY;
    if (min_p > 0) floor = top + logf(min_p);
    if (by_k) {
        const float kth = row_kth(row, strips, k, buffer, &found);
        if (kth > floor) floor = kth;
    }
    if (p < 1) {
        const float least = nucleus(row, p, top, floor, buffer, found);
        if (least > floor) floor = least;
    }
    return floor;
}

static void bound_item(void *context, int64_t r) {
    struct sample *a = context;
    const int64_t slot = a->slots[r];
    a->bounds[r] = -INFINITY;
    if (slot < 0 || slot >= a->num_slots || !is_random(a, slot)) return;
    const int64_t k = a->flags & FLAG_TOP ? a->top_k[slot] : 0;
    const float p = a->flags & FLAG_TOP ? a->top_p[slot] : 1.0f, min_p = a->min_p[slot];
    if (k <= 0 && !(p < 1) && !(min_p > 0)) return;
    const int64_t size = 2 * buffer_size(a->vocab) + strip_count(a->vocab) * LANES;
    float *buffer = k > 0 || p < 1 ? malloc(size * sizeof(float)) : NULL;
    if (!buffer && (k > 0 || p < 1)) {
        __atomic_store_n(&a->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const struct row row = row_of(a, r, slot);
    a->bounds[r] = bound_of(&row, k, p, min_p, buffer);
    free(buffer);
}

/* Few rows are cut so that every thread has a part. The winner does not depend on the cut. */
static void cut(struct sample *a, int64_t rows, int threads) {
    int64_t parts = rows ? (threads + rows - 1) / rows : 1;
    if (parts > a->vocab / MIN_CHUNK) parts = a->vocab / MIN_CHUNK;
    if (parts < 1) parts = 1;
    a->chunk = ((a->vocab + parts - 1) / parts + LANES - 1) / LANES * LANES;
    a->chunks = (a->vocab + a->chunk - 1) / a->chunk;
}

/* logits [rows, vocab > 0] with stride_bytes between rows -> out [rows]. Returns nonzero when memory runs out. */
EXPORT int headway_sample(const void *logits, const int32_t *slots, const float *temperature, const int32_t *top_k,
                          const float *top_p, const float *min_p, const int32_t *seeds, const int32_t *num_tokens,
                          int32_t *out, int64_t rows, int64_t vocab, int64_t stride_bytes, int64_t num_slots,
                          float greedy_eps, int flags, int bf, int threads) {
    struct sample a = {.logits = logits, .slots = slots, .top_k = top_k, .seeds = seeds, .num_tokens = num_tokens,
                       .temperature = temperature, .top_p = top_p, .min_p = min_p, .stride_bytes = stride_bytes,
                       .vocab = vocab, .num_slots = num_slots, .greedy_eps = greedy_eps, .flags = flags, .bf = bf};
    if (rows == 0) return 0;
    if (rows * vocab <= (flags & FLAG_RANDOM ? MIN_ELEMENTS : MIN_READ)) threads = 1;
    cut(&a, rows, threads);
    a.bounds = malloc(rows * sizeof *a.bounds + rows * a.chunks * sizeof *a.winners);
    if (!a.bounds) return 1;
    a.winners = (struct winner *)(a.bounds + rows);
    for (int64_t r = 0; r < rows; r++) a.bounds[r] = -INFINITY;
    if ((flags & FLAG_RANDOM) && (flags & (FLAG_TOP | FLAG_MIN_P))) parallel_for(rows, threads, bound_item, &a);
    parallel_for(rows * a.chunks, threads, race_item, &a);
    for (int64_t r = 0; r < rows; r++) {
        struct winner won = {-INFINITY, 0};
        for (int64_t i = r * a.chunks; i < (r + 1) * a.chunks; i++)
            if (a.winners[i].score > won.score) won = a.winners[i];
        const int real = slots[r] >= 0 && slots[r] < num_slots;
        out[r] = won.score > -INFINITY ? won.token : -real;
    }
    free(a.bounds);
    return a.failed;
}
