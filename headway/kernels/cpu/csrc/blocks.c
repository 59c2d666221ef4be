/* y = x W^T + b with W in the blocks of GGUF files (layout in blocks.h). x is rounded to 8 bits by blocks of 32, blocks with
 * outliers to 16, as two digits of 8, so that products are of integers; the sums of blocks are scaled and added in float32. Or x
 * stays as it is, in float32. */
#include "blocks.h"
#include "calls.h"

#include "common.h"
#include "float_tile.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* How integers are multiplied; SET is the best of what the compiler may use. */
#define PLAIN 0
#define PAIRS 1    /* AVX2: pairs of products in 16 bits */
#define VNNI_256 2 /* AVX-VNNI: four products in 32 bits */
#define VNNI_512 3
#define SDOT 4     /* NEON's dot products */
#if defined(HEADWAY_TEST_SET) /* tests run what this machine lacks, dot products spelled out */
#define SET HEADWAY_TEST_SET
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SET VNNI_512
#elif defined(__AVXVNNI__)
#define SET VNNI_256
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SET PAIRS
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FP16_FORMAT_IEEE)
#define SET SDOT
#include <arm_neon.h>
#else
#define SET PLAIN
#endif
#if SET == VNNI_256
#ifdef HEADWAY_TEST_SET
static __m256i dot_256(__m256i sum, __m256i w, __m256i x) {
    int32_t out[8];
    memcpy(out, &sum, sizeof out);
    for (int i = 0; i < 32; i++) out[i / 4] += ((const uint8_t *)&w)[i] * ((const int8_t *)&x)[i];
    return _mm256_loadu_si256((const __m256i *)out);
}
#else
#define dot_256 _mm256_dpbusd_avx_epi32
#endif
#endif
#define AHEAD 4096 /* bytes: the hardware's own prefetch stops at every page */

/* What is taken off unsigned values, so that sums of 16-bit pairs stay within 16 bits. */
INLINE int centre(const struct format f) { return f.bits == 5 && f.min ? 16 : f.offset; }
INLINE int is_signed(const struct format f) { return f.bits == 8 || f.lut; }

INLINE int32_t word_at(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return word;
}

/* To the nearest integer, ties to even; |x| < 2^22. */
INLINE vf nearest(const vf x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/* 32 integers from -127 to 127, given as floats. */
INLINE void store_digits(const vf *values, struct digits *to) {
#if defined(__AVX2__)
    const float *f = (const float *)values;
    __m256i q[4];
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_loadu_ps(f + 8 * i));
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to->q, bytes);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes); /* sums of two; both kinds of pairs stay apart */
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
    const int32_t words[2] = {_mm256_extract_epi32(pairs, 0), _mm256_extract_epi32(pairs, 4)};
    memcpy(to->pairs, words, sizeof words);
#else
    memset(to->pairs, 0, sizeof to->pairs);
    for (int k = 0; k < BLOCK; k++) {
        to->q[k] = (int8_t)((const float *)values)[k];
        to->pairs[k / 16][k / 2 % 2] += to->q[k];
    }
#endif
}

INLINE float largest_of(const void *x, int64_t at, const int bf) {
    vf top = {0};
    for (int i = 0; i < BLOCK / LANES; i++) {
        const vf part = load(x, at + i * LANES, bf);
        top = vmax(top, choose(part < 0, -part, part));
    }
    return max_lane(top);
}

/* 32 inputs, of which the largest is known, to 8 bits: to nearest even, d = largest / 127; tiny ones become zero. What is not
 * finite makes d so, and with it every output. `low`: the second digit goes there, rounded in the same way; NULL: there is none. */
INLINE void round_block(const void *x, int64_t at, float largest, struct activation *to, struct digits *low, const int bf) {
    vf part[BLOCK / LANES], digit[BLOCK / LANES];
    const float by = largest > 1e-30f && largest < INFINITY ? 127.0f / largest : 0;
    for (int i = 0; i < BLOCK / LANES; i++) {
        part[i] = by > 0 ? load(x, at + i * LANES, bf) * by : (vf){0};
        digit[i] = nearest(part[i]);
    }
    store_digits(digit, &to->high);
    if (low) {
        for (int i = 0; i < BLOCK / LANES; i++) digit[i] = nearest((part[i] - digit[i]) * BASE);
        store_digits(digit, low);
    }
    to->d = largest * (1.0f / 127);
    float sums[2];
    for (int half = 0; half < 2; half++) {
        sums[half] = (float)(to->high.pairs[half][0] + to->high.pairs[half][1]);
        if (low) sums[half] += (float)(low->pairs[half][0] + low->pairs[half][1]) * (1.0f / BASE);
        to->half_sum[half] = to->d * sums[half];
    }
    to->sum = to->d * (sums[0] + sums[1]);
}

/* A row, whose blocks lie `rows` apart in `to` and `low`. Steps of a block are even, so the square of its step is what it adds to
 * the error of every output. Blocks above the mean, those with outliers, get a second digit: they are few and make most of it. */
INLINE void round_row(const void *x, int64_t at, int64_t inputs, int64_t rows, struct activation *to, struct digits *low,
                      const int bf) {
    float squares = 0;
    for (int64_t b = 0; b < inputs / BLOCK; b++) {
        const float largest = largest_of(x, at + b * BLOCK, bf);
        to[b * rows].d = largest;
        squares += largest * largest;
    }
    const float mean = squares / (float)(inputs / BLOCK);
    for (int64_t b = 0; b < inputs / BLOCK; b++) {
        const float largest = to[b * rows].d;
        const int fine = largest * largest > mean;
        round_block(x, at + b * BLOCK, largest, to + b * rows, fine ? low + b * rows : NULL, bf);
        to[b * rows].fine = fine;
    }
}

/* A panel's sums, 16 a row and rows `apart`, into y, with the bias. */
INLINE void finish(const struct blocks_job *job, int64_t panel, int64_t first, int64_t rows, const float *sums, const int apart,
                   const int bf) {
    const int64_t begin = panel * WIDTH;
    for (int64_t at = begin; at < begin + WIDTH && at < job->outputs; at += LANES) {
        const vf bias = job->bias ? load_row(job->bias, at, job->outputs - at, bf) : (vf){0};
        for (int64_t r = 0; r < rows; r++)
            store_row(job->y, (first + r) * job->stride + at, load(sums, r * apart + at - begin, 0) + bias, job->outputs - at, bf);
    }
}

#include "blocks_kernel.h"

/* How this library multiplies: a number as in PLAIN and the following. */
EXPORT int headway_blocks_set(void) { return SET; }

struct round_job {
    const void *x;
    struct activation *to;
    struct digits *low;
    int64_t rows, inputs;
    int bf;
};

#define ROUND_ROWS 4

static void round_item(void *context, int64_t item) {
    const struct round_job *a = context;
    for (int64_t r = item * ROUND_ROWS; r < a->rows && r < (item + 1) * ROUND_ROWS; r++) {
        if (a->bf) round_row(a->x, r * a->inputs, a->inputs, a->rows, a->to + r, a->low + r, 1);
        else round_row(a->x, r * a->inputs, a->inputs, a->rows, a->to + r, a->low + r, 0);
    }
}

/* Where sums start so that they are of q - centre. */
static void set_starts(struct digits *x, const struct format f) {
    const int off = SET == SDOT ? 0 : is_signed(f) ? (SET == PAIRS ? 0 : 128) : centre(f);
    int pairs[2][2];
    for (int half = 0; half < 2; half++)
        for (int p = 0; p < 2; p++) pairs[half][p] = -off * x->pairs[half][p];
    if (f.groups == 1)
        for (int p = 0; p < 2; p++) pairs[0][p] += pairs[1][p];
    for (int half = 0; half < 2; half++) {
        if (SET == PAIRS) x->init[half] = (int32_t)((uint32_t)(uint16_t)pairs[half][0] | (uint32_t)pairs[half][1] << 16);
        else x->init[half] = pairs[half][0] + pairs[half][1];
    }
}

static void set_all_starts(struct activation *x, struct digits *low, int64_t count, const struct format f) {
    for (int64_t i = 0; i < count; i++) {
        set_starts(&x[i].high, f);
        if (x[i].fine) set_starts(low + i, f);
    }
}

struct multiply {
    struct blocks_job job;
    panel_kernel kernel;
    int64_t width, rows_at_once; /* what one call of the kernel takes */
    int64_t panels, panels_per_item, items_per_rows;
};

static void multiply_item(void *context, int64_t item) {
    const struct multiply *a = context;
    const int64_t first = item / a->items_per_rows * a->rows_at_once, begin = item % a->items_per_rows * a->panels_per_item;
    const int64_t end = begin + a->panels_per_item < a->panels ? begin + a->panels_per_item : a->panels;
    const int64_t rows = least(a->job.rows - first, a->rows_at_once);
    for (int64_t p = begin; p < end; p++) a->kernel(&a->job, p, first, rows);
}

static void one_part(struct multiply *a, int threads) {
    const int64_t row_blocks = (a->job.rows + a->rows_at_once - 1) / a->rows_at_once;
    int64_t parts = threads > 1 ? threads * 8 : 1;
    if (a->job.outputs * a->job.inputs < 65536) parts = 1;
    a->panels = (a->job.outputs + a->width - 1) / a->width;
    a->panels_per_item = (a->panels + parts - 1) / parts;
    a->items_per_rows = (a->panels + a->panels_per_item - 1) / a->panels_per_item;
    parallel_for(a->items_per_rows * row_blocks, parts > 1 ? threads : 1, multiply_item, a);
}

/* x [rows, inputs]; parts [count, 2] of (type, outputs), whose panels follow each other in `packed`, each part from a multiple
 * of 64 bytes on; bias [N] or NULL; y [rows, N], N the sum of outputs. bf: x, bias and y are bfloat16, else float32. exact: x,
 * in float32, is not rounded.
 * Returns 0; -1: no memory; -2: an unknown type. */
EXPORT int headway_blocks_linear(const void *x, const uint8_t *packed, const void *bias, void *y, const int64_t *parts,
                                 int64_t count, int64_t rows, int64_t inputs, int bf, int exact, int threads) {
    int64_t stride = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!blocks_format((int)parts[2 * i]).bits) return -2;
        stride += parts[2 * i + 1];
    }
    if (rows <= 0 || stride <= 0) return 0;
    const int64_t blocks = exact ? 0 : inputs / BLOCK * rows;
    struct activation few[128], *rounded = few;
    struct digits few_low[128], *low = few_low;
    if (blocks > 128) {
        const size_t bytes = (size_t)blocks * sizeof *rounded;
        if (!(rounded = malloc(bytes + (size_t)blocks * sizeof *low))) return -1;
        low = (struct digits *)((char *)rounded + bytes);
    }
    struct round_job round = {x, rounded, low, rows, inputs, bf};
    if (!exact) parallel_for((rows + ROUND_ROWS - 1) / ROUND_ROWS, threads, round_item, &round);
    int64_t column = 0, item = bf ? 2 : 4;
    for (int64_t i = 0; i < count; i++) {
        const int type = (int)parts[2 * i];
        const int64_t outputs = parts[2 * i + 1];
        set_all_starts(rounded, low, blocks, blocks_format(type));
        struct multiply a = {{rounded, low, exact ? x : NULL, packed, bias ? (const char *)bias + column * item : NULL,
                              (char *)y + column * item, rows, outputs, inputs, stride, bf, blocks_format(type)},
                             kernel_of(type), exact ? PANEL : WIDTH, exact ? EXACT_ROWS : ROWS_AT_ONCE, 0, 0, 0};
        one_part(&a, threads);
        packed += ((outputs + WIDTH - 1) / WIDTH * panel_bytes(blocks_format(type), inputs) + 63) / 64 * 64;
        column += outputs;
    }
    if (rounded != few) free(rounded);
    return 0;
}
