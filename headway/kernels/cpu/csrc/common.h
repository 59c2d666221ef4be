/* Shared by the native CPU kernels: float vectors, bfloat16 conversion, exp and tanh, a parallel loop.
 *
 * Written with the vector extensions of GCC >= 12 and Clang. LANES is what one register of the machine holds: compilers lower
 * wider vectors to loads and stores of single elements. `bf` is a compile-time constant everywhere: 1 = tensors are bfloat16,
 * 0 = float32. All arithmetic is float32.
 */
#ifndef HEADWAY_COMMON_H
#define HEADWAY_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

#if defined(__AVX512F__)
#define LANES 16
#define IOTA 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
#define LANES 8
#define IOTA 0, 1, 2, 3, 4, 5, 6, 7
#else /* NEON, SSE */
#define LANES 4
#define IOTA 0, 1, 2, 3
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF_DOT 1 /* products of pairs of bfloat16, summed in float32, are one instruction */
#else
#define BF_DOT 0
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float vf_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf as_float(vu x) { return (vf)x; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf vmax(vf a, vf b) { return choose((a > b) | (a != a), a, b); } /* NaN wins */

INLINE float bf_to_float(uint16_t h) {
    union { uint32_t u; float f; } c = {.u = (uint32_t)h << 16};
    return c.f;
}

/* Round to nearest even, NaN stays NaN: bit for bit what torch does. */
INLINE uint16_t float_to_bf(float x) {
    union { float f; uint32_t u; } c = {.f = x};
    if (x != x) return 0x7fc0;
    return (uint16_t)((c.u + 0x7fff + ((c.u >> 16) & 1)) >> 16);
}

INLINE vh to_bf(vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);
    rounded = (rounded & ~nan) | (0x7fc0 & nan);
#if LANES == 8 /* compilers narrow eight integers one by one */
    const __m256i r = (__m256i)rounded;
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
#else
    return __builtin_convertvector(rounded, vh);
#endif
}

INLINE vf from_bf(vh h) { return as_float(__builtin_convertvector(h, vu) << 16); }

/* The value a tensor of this dtype would hold. */
INLINE vf round_to(vf x, const int bf) { return bf ? from_bf(to_bf(x)) : x; }

INLINE vf load(const void *p, int64_t i, const int bf) {
    return bf ? from_bf((vh) * (const vh_mem *)((const uint16_t *)p + i)) : (vf) * (const vf_mem *)((const float *)p + i);
}

INLINE void store(void *p, int64_t i, vf x, const int bf) {
    if (bf) *(vh_mem *)((uint16_t *)p + i) = to_bf(x);
    else *(vf_mem *)((float *)p + i) = x;
}

/* The first n < LANES elements; the other lanes are zero. Nothing past them is touched. */
INLINE vf load_part(const void *p, int64_t i, int64_t n, const int bf) {
    if (bf) {
        vh h = {0};
        for (int64_t j = 0; j < n; j++) h[j] = ((const uint16_t *)p)[i + j];
        return from_bf(h);
    }
    vf x = {0};
    for (int64_t j = 0; j < n; j++) x[j] = ((const float *)p)[i + j];
    return x;
}

INLINE void store_part(void *p, int64_t i, vf x, int64_t n, const int bf) {
    if (bf) {
        vh h = to_bf(x);
        memcpy((uint16_t *)p + i, &h, n * 2);
    } else {
        memcpy((float *)p + i, &x, n * 4);
    }
}

/* One vector of a row of `size` elements, whole or its last part. */
INLINE vf load_row(const void *p, int64_t i, int64_t left, const int bf) {
    return left >= LANES ? load(p, i, bf) : load_part(p, i, left, bf);
}

INLINE void store_row(void *p, int64_t i, vf x, int64_t left, const int bf) {
    if (left >= LANES) store(p, i, x, bf);
    else store_part(p, i, x, left, bf);
}

/* All lanes of x become the sum (or the maximum) of all. */
#if LANES == 16
#define FOLD(x, op)                                                                                        \
    do {                                                                                                   \
        x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));    \
        x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));    \
        x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));    \
        x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));    \
    } while (0)
#elif LANES == 8
#define FOLD(x, op)                                                            \
    do {                                                                       \
        x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));      \
        x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));      \
        x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));      \
    } while (0)
#else
#define FOLD(x, op)                                            \
    do {                                                       \
        x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));  \
        x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2));  \
    } while (0)
#endif
INLINE vf plus(vf a, vf b) { return a + b; }

INLINE float sum(vf x) {
    FOLD(x, plus);
    return x[0];
}

INLINE float max_lane(vf x) {
    FOLD(x, vmax);
    return x[0];
}

/* One multiply-add step for LANES outputs. With `pairs` (BF_DOT and bfloat16 tensors), w holds two neighbouring bfloat16 for
 * each output and x points to the two that all share; else w holds a float each and x points to a float. */
INLINE vf multiply_add(vf acc, vu w, const void *x, const int pairs) {
#if BF_DOT
    if (pairs) {
        int32_t word;
        memcpy(&word, x, 4);
#ifdef __x86_64__
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(word));
#else
        return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_s32(word));
#endif
    }
#else
    (void)pairs;
#endif
    float f;
    memcpy(&f, x, 4);
    return acc + (vf)w * f;
}

/* e^x to about one ulp: 2^n * e^r with |r| <= ln2/2, Taylor to r^7. Below -87 it is 0 (so e^-inf is 0), above 88 it saturates;
 * NaN stays NaN. */
INLINE vf vexp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
    vi tiny = x < -87.0f;
    vf y = choose(x > 88.0f, splat(88.0f), choose(tiny, splat(-87.0f), x));
    vf n = (y * 1.44269504088896341f + magic) - magic;
    vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    return choose(tiny, (vf){0}, p * (vf)bits);
}

/* Near zero 1 - 2/(e^2x + 1) cancels, so a Taylor polynomial serves there. */
INLINE vf vtanh(vf x) {
    vf s = x * x;
    vf small = x + x * s * (s * (s * (s * (62.0f / 2835) - 17.0f / 315) + 2.0f / 15) - 1.0f / 3);
    vf large = 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
    return choose(s < 0.0625f, small, large);
}

/* x * Phi(x). With e = erfc(|x| / sqrt 2) / 2 it is x - x e for x > 0 and x e else, so small results keep their digits; e by
 * Abramowitz and Stegun 7.1.26, to 1.5e-7 of 1. */
INLINE vf vgelu(vf x) {
    const vf size = choose(x < 0.0f, -x, x);
    const vf t = 1.0f / (1.0f + size * (0.3275911f * 0.70710678118654752f));
    vf p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf tail = size * 0.5f * p * t * vexp(-0.5f * x * x);
    return choose(x > 0.0f, x - tail, choose(x != x, x, -tail));
}

/* Parallel loop: body(context, i) for i < items, each i once, in any order, on at most `threads` threads. */
typedef void (*loop_body)(void *context, int64_t item);
void parallel_for(int64_t items, int threads, loop_body body, void *context);

#endif
