/* Rows of logits: clean loads, the k-th largest, the bound of a probability mass. Shared by sample and gather_logprobs. */
#ifndef HEADWAY_SELECT_H
#define HEADWAY_SELECT_H

#include "common.h"

#define STRIP (LANES * 16) /* what one vector of maxima stands for */

/* A double for each lane, in two registers. */
typedef double vd_half __attribute__((vector_size(LANES * 4)));
typedef float vf_half __attribute__((vector_size(LANES * 2)));
struct wide {
    vd_half low, high;
};

INLINE struct wide add_wide(struct wide sums, vf x) {
    vf_half halves[2];
    memcpy(halves, &x, sizeof x);
    sums.low += __builtin_convertvector(halves[0], vd_half);
    sums.high += __builtin_convertvector(halves[1], vd_half);
    return sums;
}

/* The lanes' sum, in order. */
INLINE double total_wide(struct wide sums) {
    double total = 0;
    for (int lane = 0; lane < LANES / 2; lane++) total += sums.low[lane];
    for (int lane = 0; lane < LANES / 2; lane++) total += sums.high[lane];
    return total;
}

/* One row of logits, divided by `heat` where it says so. `bf` is repeated as a constant where it matters. */
struct row {
    const void *logits;
    int64_t vocab;
    float heat;
    int bf;
};

INLINE int any(vi mask) {
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int64_t halves[2];
    memcpy(halves, &mask, sizeof mask);
    return (halves[0] | halves[1]) != 0;
#endif
}

INLINE double sum_wide(vf x) { return total_wide(add_wide((struct wide){{0}, {0}}, x)); }

/* NaN counts as -inf; so do the lanes past the row's end. */
INLINE vf load_logits(const void *logits, int64_t i, int64_t left, const int bf) {
    vf x = splat(-INFINITY);
    if (left >= LANES) x = load(logits, i, bf);
    else
        for (int64_t j = 0; j < left; j++)
            x[j] = bf ? bf_to_float(((const uint16_t *)logits)[i + j]) : ((const float *)logits)[i + j];
    return choose(x == x, x, splat(-INFINITY));
}

/* e^(x - top) for x <= top, also where both are +inf. */
INLINE vf weight_below(vf x, float top) { return choose(x == top, splat(1.0f), vexp(x - top)); }

/* Unsigned integers that order as the floats do; both zeros are one. */
INLINE uint32_t order_key(float x) {
    union { float f; uint32_t u; } c = {.f = x + 0.0f};
    return c.u ^ ((uint32_t)((int32_t)c.u >> 31) | 0x80000000u);
}

/* Appends the lanes of x in `keep` to the `size` elements of `to`; returns the new size. Writes up to LANES elements. */
INLINE int64_t append(float *to, int64_t size, vf x, vi keep) {
#if LANES == 16
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)keep, (__m512i)keep);
    _mm512_storeu_ps(to + size, _mm512_maskz_compress_ps(mask, (__m512)x));
    return size + __builtin_popcount(mask);
#else
    for (int lane = 0; lane < LANES; lane++) {
        to[size] = x[lane];
        size -= keep[lane];
    }
    return size;
#endif
}

/* Which lanes lie before the end of a row that has `left` elements more. */
INLINE vi lanes_before(int64_t left) {
    const vi lane = {IOTA};
    return lane < (int32_t)(left < LANES ? left : LANES);
}

/* Elements of a buffer for one row, with what `append` may write past them. */
INLINE int64_t buffer_size(int64_t vocab) { return (vocab + 2 * LANES - 1) / LANES * LANES; }

int64_t strip_count(int64_t vocab);

/* The largest of the row over heat; with `strips` [LANES * strip_count], also lane by lane that of every STRIP elements. */
float row_top(const struct row *row, float *strips);

/* The k-th largest, 1 <= k <= vocab. strips as from row_top, used up; buffer [buffer_size] receives *found elements: all
 * x >= the result and a few more. Many of them are used up, too: then *found is -1. */
float row_kth(const struct row *row, float *strips, int64_t k, float *buffer, int64_t *found);

/* All elements >= low into buffer [buffer_size]; returns how many. */
int64_t row_collect(const struct row *row, float low, float *buffer);

/* The largest t such that the elements >= t weigh at least `target` > 0; weights NULL: 1 each. size > 0. From MANY elements
 * on, x and weights are used up. */
#define MANY 1024
float select_mass(float *x, float *weights, int64_t size, double target);

#endif
