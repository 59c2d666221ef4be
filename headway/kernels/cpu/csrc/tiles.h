/* Products of bfloat16 in tiles (Intel AMX). Part of linear.c.
 *
 * A panel is in the layout that tile products want: 16 steps of it are two tiles of 16 pairs of inputs times 16 outputs. x is
 * copied into tiles of 16 rows times 32 inputs, of fewer rows if it has fewer. Every output is one chain over rising tiles of
 * inputs, and all numbers of rows take this path, so a row's result does not depend on its neighbours here either.
 */
#ifndef HEADWAY_TILES_H
#define HEADWAY_TILES_H

#define TILE_ROWS 16
#define ROW_BYTES (1 << 20) /* of x: half of the second cache; more than that goes in blocks of rows and inputs */
#define ROWS_OF_BLOCKS 256
#define TILES_OF_BLOCK 32
#define TILE_PANELS 8 /* whose sums are kept from block to block */

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_STEPS 16    /* of a panel: pairs of inputs */
#define TILE_BYTES 1024  /* of weights, and of sixteen rows of x */
#define TILES_AHEAD 4096

/* GCC's intrinsics do not say that they read memory. */
#define SETTLE() __asm__ volatile("" ::: "memory")

/* Linux hands out the tiles' registers on request, to all threads of the process. */
static int tiles_allowed(void) {
    static int known; /* 1: yes, -1: no */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) ? -1 : 1;
    return known > 0;
}

/* Tiles 0 to 3: sums of two times `rows` rows and two times 16 outputs; 4 and 5: x; 6 and 7: weights. */
static void configure_tiles(int64_t rows) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = t < 6 ? (uint8_t)rows : TILE_STEPS;
    }
    SETTLE();
    _tile_loadconfig(&shapes);
}

/* One or two tiles of rows times `count` tiles of a panel; x of the second `next` bytes behind the first's. */
INLINE void multiply_tiles(const int two, const char *x, int64_t x_bytes, int64_t next, const char *w, int64_t count,
                           const char *ahead, int64_t fetch) {
    for (int64_t s = 0; s < count; s++, ahead += fetch) {
        const char *at = w + s * 2 * TILE_BYTES;
        for (int64_t line = 0; line < fetch; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        _tile_loadd(4, x + s * x_bytes, 64);
        _tile_loadd(6, at, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, at + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + next + s * x_bytes, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* sums [2 * 16, PANEL], or what is added to them, of one or two tiles of rows. `tail` holds the panel's last steps, filled up with
 * zeros, or is NULL. */
INLINE void tile_sums(const int two, const char *x, int64_t x_bytes, int64_t next, const char *w, int64_t whole,
                      const char *tail, const char *ahead, int64_t fetch, float *sums, int resume) {
    if (resume) {
        _tile_loadd(0, sums, PANEL * 4);
        _tile_loadd(1, sums + 16, PANEL * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if (two && resume) {
        _tile_loadd(2, sums + TILE_ROWS * PANEL, PANEL * 4);
        _tile_loadd(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
    } else if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    multiply_tiles(two, x, x_bytes, next, w, whole, ahead, fetch);
    if (tail) multiply_tiles(two, x + whole * x_bytes, x_bytes, next, tail, 1, ahead, 0);
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (two) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
    }
}

INLINE int64_t tile_height(int64_t rows) { return rows < TILE_ROWS ? rows : TILE_ROWS; }
INLINE int64_t tiles_of(int64_t inputs) { return (inputs + 2 * TILE_STEPS - 1) / (2 * TILE_STEPS); }

INLINE int64_t copy_bytes(int64_t rows, int64_t inputs) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS * tile_height(rows) * tiles_of(inputs) * 64;
}

/* copy [rows / 16, inputs / 32, 16, 32] <- x, both rounded up and filled up with zeros; with fewer than 16 rows tiles have as many. */
static void copy_tile(void *context, int64_t tile) {
    const struct copy_rows *a = context;
    const int64_t height = tile_height(a->rows), steps = tiles_of(a->inputs), bytes = a->inputs * 2;
    char *to = a->copy + tile * steps * height * 64;
    for (int64_t r = 0; r < height; r++)
        for (int64_t s = 0; s < steps; s++) {
            const int64_t row = tile * TILE_ROWS + r, left = bytes - s * 64;
            char *at = to + (s * height + r) * 64;
            if (row >= a->rows) memset(at, 0, 64);
            else if (left >= 64) memcpy(at, a->x + row * bytes + s * 64, 64);
            else {
                memset(at, 0, 64);
                memcpy(at, a->x + row * bytes + s * 64, left);
            }
        }
}
#else
#define TILES 0
static int tiles_allowed(void) { return 0; }
INLINE int64_t copy_bytes(int64_t rows, int64_t inputs) { return rows * inputs * 0; }
INLINE int64_t tiles_of(int64_t inputs) { return inputs; }
static void copy_tile(void *context, int64_t tile) { (void)context, (void)tile; }
#endif

#endif
