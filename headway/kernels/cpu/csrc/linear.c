/* y = x W^T + b for row-major x and W packed in panels of 32 outputs.
 *
 * A panel holds, for each k (float32) or pair of k (bfloat16), the weights of its 32 outputs side by side: a step reads two
 * 64-byte vectors, and memory is read once, in order. Each output is one chain of multiply-adds over rising k whatever the
 * number of rows, so a row's result does not depend on its neighbours in the batch, nor on the number of threads.
 */
#include "common.h"

#define PANEL 32
#ifdef __AVX512F__
#define MAX_ROWS 12 /* 24 of 32 registers accumulate */
#else
#define MAX_ROWS 3
#endif
#define K_BLOCK 1024    /* panel part that stays in the nearest cache while all rows pass over it */
#define ROW_BLOCK 192   /* rows of x per item */
#define PREFETCH 2048   /* bytes */

struct linear {
    const void *x, *packed, *bias;
    void *y;
    int64_t rows, outputs, inputs, panels_per_item, items_per_rows;
    int bf;
};

/* `m` rows times one panel over `steps` steps. partial [m, 32] carries the sums from one block of k to the next.
 * Meanwhile `ahead` (if any) is fetched into the second cache: the hardware's own prefetch stops at every page. */
INLINE void tile(const int m, const char *x, int64_t x_stride, const char *w, int64_t steps, const char *ahead,
                 float *partial, int resume, const int bf) {
    vf acc[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
        acc[i][0] = resume ? load(partial, i * PANEL, 0) : (vf){0};
        acc[i][1] = resume ? load(partial, i * PANEL + LANES, 0) : (vf){0};
    }
    for (int64_t s = 0; s < steps; s++) {
        vu w0 = (vu) * (const vu_mem *)(w + s * 128), w1 = (vu) * (const vu_mem *)(w + s * 128 + 64);
        if (ahead) {
            __builtin_prefetch(ahead + s * 128, 0, 2);
            __builtin_prefetch(ahead + s * 128 + 64, 0, 2);
        }
#pragma GCC unroll 12
        for (int i = 0; i < m; i++) {
            acc[i][0] = multiply_add(acc[i][0], w0, x + i * x_stride + s * 4, bf);
            acc[i][1] = multiply_add(acc[i][1], w1, x + i * x_stride + s * 4, bf);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
        store(partial, i * PANEL, acc[i][0], 0);
        store(partial, i * PANEL + LANES, acc[i][1], 0);
    }
}

#define CASE(n) case n: if (MAX_ROWS >= n) tile(n, x, stride, w, steps, ahead, partial, resume, bf); break;
INLINE void any_tile(int m, const char *x, int64_t stride, const char *w, int64_t steps, const char *ahead,
                     float *partial, int resume, const int bf) {
    switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
}

/* One panel for rows [first, end). */
INLINE void panel(const struct linear *a, int64_t p, int64_t first, int64_t end, const int bf) {
    const int64_t steps = bf ? a->inputs / 2 : a->inputs, stride = a->inputs * (bf ? 2 : 4);
    const int64_t tiles = (end - first + MAX_ROWS - 1) / MAX_ROWS, left = a->outputs - p * PANEL;
    const char *w = (const char *)a->packed + p * steps * 128;
    float partial[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0; k == 0 || k < steps; k += K_BLOCK) {
        const int64_t block = steps - k < K_BLOCK ? steps - k : K_BLOCK;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r0 = (end - first) * t / tiles, r1 = (end - first) * (t + 1) / tiles;
            const char *next = t ? NULL : w + k * 128 + (tiles > 1 ? block * 128 : PREFETCH);
            any_tile((int)(r1 - r0), (const char *)a->x + (first + r0) * stride + k * 4, stride, w + k * 128, block, next,
                     partial + r0 * PANEL, k > 0, bf);
        }
    }
    for (int64_t half = 0; half < PANEL && half < left; half += LANES) {
        const vf bias = a->bias ? load_row(a->bias, p * PANEL + half, left - half, bf) : (vf){0};
        for (int64_t r = first; r < end; r++)
            store_row(a->y, r * a->outputs + p * PANEL + half, load(partial, (r - first) * PANEL + half, 0) + bias,
                      left - half, bf);
    }
}

static void linear_f32(const struct linear *a, int64_t p, int64_t first, int64_t end) { panel(a, p, first, end, 0); }
static void linear_bf16(const struct linear *a, int64_t p, int64_t first, int64_t end) { panel(a, p, first, end, 1); }

static void linear_item(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL, first = item / a->items_per_rows * ROW_BLOCK;
    const int64_t begin = item % a->items_per_rows * a->panels_per_item;
    const int64_t end = begin + a->panels_per_item < panels ? begin + a->panels_per_item : panels;
    const int64_t last = first + ROW_BLOCK < a->rows ? first + ROW_BLOCK : a->rows;
    for (int64_t p = begin; p < end; p++) (a->bf ? linear_bf16 : linear_f32)(a, p, first, last);
}

/* x [rows, inputs], bias [outputs] or NULL, y [rows, outputs]; inputs is even for bfloat16. */
EXPORT void headway_linear(const void *x, const void *packed, const void *bias, void *y, int64_t rows, int64_t outputs,
                           int64_t inputs, int bf, int threads) {
    if (rows <= 0 || outputs <= 0) return;
    const int64_t panels = (outputs + PANEL - 1) / PANEL, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t parts = threads > 1 ? threads * 8 : 1;
    if (panels * inputs * PANEL < 65536) parts = 1;
    struct linear a = {x, packed, bias, y, rows, outputs, inputs, (panels + parts - 1) / parts, 0, bf};
    a.items_per_rows = (panels + a.panels_per_item - 1) / a.panels_per_item;
    parallel_for(a.items_per_rows * row_blocks, threads, linear_item, &a);
}

struct pack {
    const void *weight;
    char *packed;
    int64_t outputs, inputs;
    int bf;
};

static void pack_panel(void *context, int64_t p) {
    const struct pack *a = context;
    const int64_t unit = a->bf ? 2 : 1, steps = a->inputs / unit, row = a->inputs * (a->bf ? 2 : 4);
    char *to = a->packed + p * steps * 128;
    for (int64_t n = 0; n < PANEL; n++) {
        const char *from = (const char *)a->weight + (p * PANEL + n) * row;
        for (int64_t s = 0; s < steps; s++)
            if (p * PANEL + n < a->outputs) memcpy(to + s * 128 + n * 4, from + s * 4, 4);
            else memset(to + s * 128 + n * 4, 0, 4);
    }
}

/* weight [outputs, inputs] -> packed, ceil(outputs / 32) * 32 * inputs elements; inputs is even for bfloat16. */
EXPORT void headway_linear_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int bf, int threads) {
    struct pack a = {weight, packed, outputs, inputs, bf};
    parallel_for((outputs + PANEL - 1) / PANEL, threads, pack_panel, &a);
}
