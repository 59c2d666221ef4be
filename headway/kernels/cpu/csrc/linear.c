/* y = x W^T + b for row-major x and W packed in panels of 32 outputs.
 *
 * A panel holds, for each k (float32) or pair of k (bfloat16), the weights of its 32 outputs side by side: a step reads 128 bytes,
 * and memory is read once, in order. x in float32 takes both kinds: weights that bfloat16 holds exactly need no more bytes.
 *
 * Each output is one chain of multiply-adds over rising k whatever the number of rows, so a row's result does not depend on its
 * neighbours in the batch, nor on the number of threads.
 */
#include "calls.h"
#include "float_tile.h"

#define VECTORS (PANEL / LANES)
#if LANES == 16
#define K_BLOCK 512  /* steps of a panel that stay in the second cache while all rows pass over them */
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define K_BLOCK 192 /* 24 KiB of the first cache: six cycles of arithmetic for 128 bytes leave no time for the second */
#define CASES CASE(1) CASE(2) CASE(3)
#endif
#define WIDE_BLOCK 64   /* steps of a bfloat16 panel that are widened at once, to 16 KiB */
#define ROW_BLOCK 192   /* rows of x per item */
#define PREFETCH 4096   /* bytes */
#define ON_STACK 16384  /* bytes */

/* How a step reads w and x: a float and a float; two bfloat16 and two bfloat16; two bfloat16 and two floats. */
enum form { FLOATS, PAIRS, WIDEN };

struct linear {
    const void *x, *packed, *bias;
    void *y;
    int64_t rows, outputs, inputs, row_block, panels_per_item, items_per_rows;
    int bf, narrow, gelu, tiles; /* bf: x, bias and y are bfloat16; narrow: the panels are */
    int64_t tile_blocks; /* of inputs */
};

/* x [rows, inputs] in bfloat16, and what is made of it. */
struct copy_rows {
    const char *x;
    char *copy;
    int64_t rows, inputs;
};

#include "tiles.h"

INLINE vf add_step(vf sum, vu w, const char *x, const enum form form) {
    if (form != WIDEN) return multiply_add(sum, w, x, form == PAIRS);
    return multiply_add(multiply_add(sum, w << 16, x, 0), w & 0xffff0000u, x + 4, 0);
}

/* `m` rows times one panel over `steps` steps. partial [m, 32] carries the sums from one block of k to the next.
 * Meanwhile `ahead` (if any) is fetched into the second cache, `fetch` bytes a step: the hardware's own prefetch stops at
 * every page. */
INLINE void tile(const int m, const enum form form, const char *x, int64_t x_stride, const char *w, int64_t steps,
                 const char *ahead, int64_t fetch, float *partial, int resume) {
    vf acc[MAX_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) acc[i][c] = resume ? load(partial, i * PANEL + c * LANES, 0) : (vf){0};
#if LANES == 16 /* an address may add a stride, or two, so that three rows share a register; compilers made them anew each step */
    const char *base[(MAX_ROWS + 2) / 3];
#pragma GCC unroll 4
    for (int j = 0; j < (m + 2) / 3; j++) base[j] = x + 3 * j * x_stride;
#define ROW(i) (base[(i) / 3] + (i) % 3 * x_stride)
#else
#define ROW(i) (x + (i) * x_stride + s * (form == WIDEN ? 8 : 4))
#endif
#define WEIGHTS(c) ((vu) * (const vu_mem *)(w + s * 128 + (c) * LANES * 4))
    for (int64_t s = 0; s < steps; s++) {
        __builtin_prefetch(ahead, 0, 2);
        if (fetch > 64) __builtin_prefetch(ahead + 64, 0, 2);
        ahead += fetch;
#if LANES == 16 /* registers for both vectors of weights and one of x */
        const vu now[VECTORS] = {WEIGHTS(0), WEIGHTS(1)};
#pragma GCC unroll 12
        for (int i = 0; i < m; i++)
#pragma GCC unroll 8
            for (int c = 0; c < VECTORS; c++) acc[i][c] = add_step(acc[i][c], now[c], ROW(i), form);
#pragma GCC unroll 4
        for (int j = 0; j < (m + 2) / 3; j++) {
            base[j] += form == WIDEN ? 8 : 4;
            __asm__("" : "+r"(base[j])); /* stays in its register */
        }
#else /* for one of weights and every row of x */
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) {
            const vu now = WEIGHTS(c);
#pragma GCC unroll 12
            for (int i = 0; i < m; i++) acc[i][c] = add_step(acc[i][c], now, ROW(i), form);
        }
#endif
    }
#undef WEIGHTS
#undef ROW
#pragma GCC unroll 12
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) store(partial, i * PANEL + c * LANES, acc[i][c], 0);
}

#define CASE(n) case n: tile(n, form, x, stride, w, steps, ahead, fetch, partial, resume); break;
INLINE void any_tile(int m, const enum form form, const char *x, int64_t stride, const char *w, int64_t steps,
                     const char *ahead, int64_t fetch, float *partial, int resume) {
    switch (m) { CASES }
}

/* A function by itself, as the next one: with constants of other forms in registers its sums would not fit beside them. */
__attribute__((noinline)) void float_tile(int m, const char *x, int64_t stride, const char *w, int64_t steps, const char *ahead,
                                          int64_t fetch, float *partial, int resume) {
    any_tile(m, FLOATS, x, stride, w, steps, ahead, fetch, partial, resume);
}

/* wide [2 * steps, 32] <- a block of a bfloat16 panel, the pairs taken apart. */
static __attribute__((noinline)) void widen(const char *w, int64_t steps, float *wide) {
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) {
            const vu both = (vu) * (const vu_mem *)(w + s * 128 + c * LANES * 4);
            store(wide, 2 * s * PANEL + c * LANES, as_float(both << 16), 0);
            store(wide, (2 * s + 1) * PANEL + c * LANES, as_float(both & 0xffff0000u), 0);
        }
}

/* y of one panel and rows [first, end) from their sums [rows, 32]. */
INLINE void finish(const struct linear *a, int64_t p, int64_t first, int64_t end, const float *sums, const int bf) {
    const int64_t left = a->outputs - p * PANEL;
    vf bias[VECTORS];
    for (int c = 0; c < VECTORS; c++)
        bias[c] = a->bias && c * LANES < left ? load_row(a->bias, p * PANEL + c * LANES, left - c * LANES, bf) : (vf){0};
    for (int64_t r = first; r < end; r++)
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) {
            if (c * LANES >= left) break;
            vf y = load(sums, (r - first) * PANEL + c * LANES, 0) + bias[c];
            if (a->gelu) y = vgelu(round_to(y, bf));
            store_row(a->y, r * a->outputs + p * PANEL + c * LANES, y, left - c * LANES, bf);
        }
}

/* One panel for rows [first, end). Where bfloat16 has no products of its own, a->x holds floats; then, as for x in float32, few
 * rows read a panel of bfloat16 as it is, and many share what is widened once. */
INLINE void panel(const struct linear *a, int64_t p, int64_t first, int64_t end, const int bf, const int narrow) {
    const enum form form = !narrow ? FLOATS : bf && BF_DOT ? PAIRS : WIDEN;
    const int64_t steps = narrow ? a->inputs / 2 : a->inputs, step_bytes = form == WIDEN ? 8 : 4;
    const int64_t stride = steps * step_bytes, tiles = (end - first + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t block = tiles == 1 ? steps : form == WIDEN ? WIDE_BLOCK : K_BLOCK;
    const char *w = (const char *)a->packed + p * steps * 128;
    float partial[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    float wide[form == WIDEN ? 2 * WIDE_BLOCK * PANEL : 1] __attribute__((aligned(64)));
    for (int64_t k = 0; k == 0 || k < steps; k += block) {
        const int64_t now = steps - k < block ? steps - k : block;
        const char *here = w + k * 128;
        if (form == WIDEN && tiles > 1) widen(here, now, wide);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r0 = (end - first) * t / tiles, r1 = (end - first) * (t + 1) / tiles;
            const char *next = here + (tiles > 1 ? now * 128 + now * 128 * t / tiles : PREFETCH);
            const char *x = (const char *)a->x + (first + r0) * stride + k * step_bytes;
            if (form == WIDEN && tiles > 1)
                float_tile((int)(r1 - r0), x, stride, (const char *)wide, 2 * now, next, 64 / tiles, partial + r0 * PANEL, k > 0);
            else if (form == FLOATS)
                float_tile((int)(r1 - r0), x, stride, here, now, next, 128 / tiles, partial + r0 * PANEL, k > 0);
            else any_tile((int)(r1 - r0), form, x, stride, here, now, next, 128 / tiles, partial + r0 * PANEL, k > 0);
        }
    }
    finish(a, p, first, end, partial, bf);
}

#if TILES
/* Panels [begin, end) for rows [first, last), from tiles of x, which a->x holds. A block of inputs goes over all rows and panels
 * before the next one, whose sums go on from `sums` [panels, rows, 32]; with one block they need no place for long. */
static void panels_in_tiles(const struct linear *a, int64_t begin, int64_t end, int64_t first, int64_t last, float *sums) {
    const int64_t steps = a->inputs / 2, whole = steps / TILE_STEPS, rest = steps % TILE_STEPS;
    const int64_t x_bytes = tile_height(a->rows) * 64, next = tiles_of(a->inputs) * x_bytes, blocks = a->tile_blocks;
    const int64_t passes = (last - first + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), fetch = 2 * TILE_BYTES / passes;
    char tail[2 * TILE_BYTES] __attribute__((aligned(64)));
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t from = whole * b / blocks, count = whole * (b + 1) / blocks - from;
        for (int64_t p = begin; p < end; p++) {
            const char *w = (const char *)a->packed + p * steps * 128, *end_of_panel = b == blocks - 1 && rest ? tail : NULL;
            if (end_of_panel) {
                memcpy(tail, w + whole * 2 * TILE_BYTES, rest * 128);
                memset(tail + rest * 128, 0, sizeof tail - rest * 128);
            }
            SETTLE();
            w += from * 2 * TILE_BYTES;
            const char *ahead = w + (passes > 1 ? steps * 128 : TILES_AHEAD);
            for (int64_t r = first; r < last; r += 2 * TILE_ROWS, ahead += count * fetch) {
                const char *x = (const char *)a->x + r / TILE_ROWS * next + from * x_bytes;
                float *here = sums + (blocks > 1 ? ((p - begin) * passes * 2 * TILE_ROWS + r - first) * PANEL : 0);
                if (last - r > TILE_ROWS) tile_sums(1, x, x_bytes, next, w, count, end_of_panel, ahead, fetch, here, b > 0);
                else tile_sums(0, x, x_bytes, next, w, count, end_of_panel, ahead, fetch, here, b > 0);
                if (b == blocks - 1) finish(a, p, r, least(r + 2 * TILE_ROWS, last), here, 1);
            }
        }
    }
}
#endif

static void linear_f32(const struct linear *a, int64_t p, int64_t first, int64_t end) { panel(a, p, first, end, 0, 0); }
static void linear_narrow(const struct linear *a, int64_t p, int64_t first, int64_t end) { panel(a, p, first, end, 0, 1); }
static void linear_bf16(const struct linear *a, int64_t p, int64_t first, int64_t end) { panel(a, p, first, end, 1, 1); }

static void linear_item(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL, first = item / a->items_per_rows * a->row_block;
    const int64_t begin = item % a->items_per_rows * a->panels_per_item;
    const int64_t end = least(begin + a->panels_per_item, panels), last = least(first + a->row_block, a->rows);
#if TILES
    if (a->tiles) {
        float sums[TILE_PANELS * ROWS_OF_BLOCKS * PANEL] __attribute__((aligned(64)));
        configure_tiles(tile_height(a->rows));
        for (int64_t p = begin; p < end; p += TILE_PANELS) panels_in_tiles(a, p, least(p + TILE_PANELS, end), first, last, sums);
        _tile_release(); /* else every switch to another process saves them */
        return;
    }
#endif
    for (int64_t p = begin; p < end; p++) (a->bf ? linear_bf16 : a->narrow ? linear_narrow : linear_f32)(a, p, first, last);
}

static void widen_row(void *context, int64_t r) {
    const struct copy_rows *a = context;
    for (int64_t i = 0; i < a->inputs; i += LANES)
        store_row(a->copy, r * a->inputs + i, load_row(a->x, r * a->inputs + i, a->inputs - i, 1), a->inputs - i, 0);
}

/* x [rows, inputs], bias [outputs] or NULL, y [rows, outputs], through x Phi(x) with `gelu`. bf: these are bfloat16; narrow: the
 * panels are, as they must be with bf, and inputs is even. Returns 0, or -1 without memory. */
EXPORT int headway_linear(const void *x, const void *packed, const void *bias, void *y, int64_t rows, int64_t outputs,
                          int64_t inputs, int bf, int narrow, int gelu, int threads) {
    if (rows <= 0 || outputs <= 0) return 0;
    struct linear a = {.x = x, .packed = packed, .bias = bias, .y = y, .rows = rows, .outputs = outputs, .inputs = inputs,
                       .row_block = ROW_BLOCK, .bf = bf, .narrow = narrow, .gelu = gelu, .tiles = bf && tiles_allowed(),
                       .tile_blocks = 1};
    char local[ON_STACK] __attribute__((aligned(64))), *copy = local;
    const int64_t bytes = a.tiles ? copy_bytes(rows, inputs) : bf && !BF_DOT ? rows * inputs * 4 : 0;
    if (bytes > ON_STACK && !(copy = malloc(bytes))) return -1;
    if (bytes) {
        struct copy_rows c = {x, copy, rows, inputs};
        const int64_t items = a.tiles ? (rows + TILE_ROWS - 1) / TILE_ROWS : rows;
        parallel_for(items, bytes > 262144 ? threads : 1, a.tiles ? copy_tile : widen_row, &c);
        a.x = copy;
    }
    if (a.tiles && rows * tiles_of(inputs) * 64 <= ROW_BYTES) a.row_block = rows;
    else if (a.tiles) {
        a.row_block = ROWS_OF_BLOCKS;
        a.tile_blocks = (tiles_of(inputs) + TILES_OF_BLOCK - 1) / TILES_OF_BLOCK;
    }
    const int64_t panels = (outputs + PANEL - 1) / PANEL, row_blocks = (rows + a.row_block - 1) / a.row_block;
    int64_t parts = threads > 1 ? threads * 8 : 1;
    if (panels * inputs * PANEL * (rows < 8 ? rows : 8) < 65536) parts = 1;
    a.panels_per_item = (panels + parts - 1) / parts;
    a.items_per_rows = (panels + a.panels_per_item - 1) / a.panels_per_item;
    parallel_for(a.items_per_rows * row_blocks, threads, linear_item, &a);
    if (copy != local) free(copy);
    return 0;
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
