/* Few rows of float32 times a panel of float32 weights; linear.c has it, blocks.c brings panels that it widens from blocks. */
#ifndef HEADWAY_FLOAT_TILE_H
#define HEADWAY_FLOAT_TILE_H

#include "common.h"

#define PANEL 32 /* outputs */
#if LANES == 16
#define MAX_ROWS 12 /* 24 of 32 registers accumulate */
#else
#define MAX_ROWS 3 /* 12 of 16 registers accumulate (AVX2), 24 of 32 (NEON) */
#endif

/* m <= MAX_ROWS rows of x, `stride` bytes apart, times w [steps, PANEL]; partial [m, PANEL], which goes on from its values with
 * `resume`. `fetch` bytes of `ahead` are asked for at each step. */
void float_tile(int m, const char *x, int64_t stride, const char *w, int64_t steps, const char *ahead, int64_t fetch,
                float *partial, int resume);

#endif
