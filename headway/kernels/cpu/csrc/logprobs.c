/* gather_logprobs: one row at a time, rows in parallel. */
#include "select.h"

#define MIN_ELEMENTS 65536 /* less than this is done before a second thread has woken up */

struct gather {
    const char *logits;
    const int32_t *token_ids, *slots, *num_logprobs, *id_counts, *id_table;
    int32_t *ids, *ranks, *counts;
    float *logprobs;
    int64_t stride_bytes, vocab, num_slots, width, max_entries;
    int bf, failed;
};

INLINE float logit_at(const struct row *row, int64_t token) {
    if (token < 0 || token >= row->vocab) return -INFINITY;
    const float x = row->bf ? bf_to_float(((const uint16_t *)row->logits)[token]) : ((const float *)row->logits)[token];
    return x == x ? x : -INFINITY;
}

/* Sum of e^(x - top), and how many x >= chosen. */
INLINE double measure(const struct row *row, float top, float chosen, int64_t *rank, const int bf) {
    struct wide mass = {{0}, {0}};
    vi above = {0};
    for (int64_t i = 0; i < row->vocab; i += LANES) {
        const vf x = load_logits(row->logits, i, row->vocab - i, bf);
        mass = add_wide(mass, weight_below(x, top));
        above -= x >= chosen;
    }
    *rank = chosen == -INFINITY ? -(-row->vocab & (LANES - 1)) : 0; /* lanes past the end are -inf */
    for (int lane = 0; lane < LANES; lane++) *rank += above[lane];
    return total_wide(mass);
}

/* Keys (value, lower id first) of the `wanted` best, given the value of the last of them. */
INLINE void best_keys(const struct row *row, float last, int64_t wanted, uint64_t *keys, const int bf) {
    int64_t found = 0, ties = 0;
    for (int64_t i = 0; i < row->vocab; i += LANES) {
        const vf x = load_logits(row->logits, i, row->vocab - i, bf);
        const vi keep = x >= last;
        if (!any(keep)) continue;
        for (int64_t lane = 0; lane < LANES && i + lane < row->vocab; lane++) {
            if (!keep[lane]) continue;
            const uint64_t key = (uint64_t)order_key(x[lane]) << 32 | (0xffffffffu - (uint32_t)(i + lane));
            /* Those above the last value fill the front; ties, the lowest ids first, fill the back while there is room. */
            if (x[lane] > last) keys[found++] = key;
            else if (ties < wanted) keys[wanted + ties++] = key;
        }
    }
    for (int64_t tie = 0; found < wanted; found++, tie++) keys[found] = keys[wanted + tie];
}

static int descending(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The ids of the 1 <= wanted <= vocab largest into ids. Returns nonzero when memory runs out. */
static int top_ids(const struct row *row, int64_t wanted, float *strips, int32_t *ids) {
    uint64_t *keys = malloc(2 * wanted * sizeof *keys + buffer_size(row->vocab) * sizeof(float));
    if (!keys) return 1;
    int64_t found;
    const float last = row_kth(row, strips, wanted, (float *)(keys + 2 * wanted), &found);
    if (row->bf) best_keys(row, last, wanted, keys, 1);
    else best_keys(row, last, wanted, keys, 0);
    qsort(keys, wanted, sizeof *keys, descending);
    for (int64_t i = 0; i < wanted; i++) ids[i] = (int32_t)(0xffffffffu - (uint32_t)keys[i]);
    free(keys);
    return 0;
}

/* Fills entries 1.. of ids (not yet checked) with what the row asks for; returns how many, or -1 without memory. */
static int64_t choose_entries(const struct gather *a, const struct row *row, int64_t slot, int32_t *ids, float *top) {
    const int64_t listed = a->id_counts[slot], room = a->width < a->max_entries ? a->width : a->max_entries;
    int64_t wanted = a->num_logprobs[slot] < a->max_entries ? a->num_logprobs[slot] : a->max_entries;
    if (listed > 0) {
        *top = row_top(row, NULL);
        const int64_t number = listed < room ? listed : room;
        memcpy(ids + 1, a->id_table + slot * a->width, number * sizeof *ids);
        return number;
    }
    if (wanted > a->vocab) wanted = a->vocab;
    float *strips = wanted > 0 ? malloc(strip_count(a->vocab) * LANES * sizeof(float)) : NULL;
    if (wanted > 0 && !strips) return -1;
    *top = row_top(row, strips);
    const int failed = wanted > 0 && top_ids(row, wanted, strips, ids + 1);
    free(strips);
    return failed ? -1 : wanted;
}

static void gather_row(void *context, int64_t r) {
    struct gather *a = context;
    const int64_t slot = a->slots[r], entries = 1 + a->max_entries;
    int32_t *ids = a->ids + r * entries;
    float *logprobs = a->logprobs + r * entries, top;
    memset(ids, 0, entries * sizeof *ids);
    memset(logprobs, 0, entries * sizeof *logprobs);
    a->ranks[r] = a->counts[r] = 0;
    if (slot < 0 || slot >= a->num_slots || (a->num_logprobs[slot] < 0 && a->id_counts[slot] <= 0)) return;
    const struct row row = {a->logits + r * a->stride_bytes, a->vocab, 1.0f, a->bf};
    const int64_t number = choose_entries(a, &row, slot, ids, &top);
    if (number < 0) {
        __atomic_store_n(&a->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    int64_t rank;
    ids[0] = a->token_ids[r];
    const float chosen = logit_at(&row, ids[0]);
    const double mass = a->bf ? measure(&row, top, chosen, &rank, 1) : measure(&row, top, chosen, &rank, 0);
    const float log_mass = logf((float)mass);
    for (int64_t i = 0; i <= number; i++) {
        const float x = logit_at(&row, ids[i]);
        logprobs[i] = x == -INFINITY ? x : (x == top ? 0.0f : x - top) - log_mass;
        if (ids[i] < 0 || ids[i] >= a->vocab) ids[i] = 0;
    }
    a->ranks[r] = (int32_t)rank;
    a->counts[r] = (int32_t)number + 1;
}

/* logits [rows, vocab > 0] with stride_bytes between rows; id_table [num_slots, width]; ids, logprobs
 * [rows, 1 + max_entries]; ranks, counts [rows]. Returns nonzero when memory runs out. */
EXPORT int headway_gather_logprobs(const void *logits, const int32_t *token_ids, const int32_t *slots,
                                   const int32_t *num_logprobs, const int32_t *id_counts, const int32_t *id_table,
                                   int32_t *ids, float *logprobs, int32_t *ranks, int32_t *counts, int64_t rows,
                                   int64_t vocab, int64_t stride_bytes, int64_t num_slots, int64_t width,
                                   int64_t max_entries, int bf, int threads) {
    struct gather a = {logits, token_ids, slots, num_logprobs, id_counts, id_table, ids, ranks, counts, logprobs,
                       stride_bytes, vocab, num_slots, width, max_entries, bf, 0};
    parallel_for(rows, rows * vocab > MIN_ELEMENTS ? threads : 1, gather_row, &a);
    return a.failed;
}
