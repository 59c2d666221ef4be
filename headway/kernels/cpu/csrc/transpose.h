/* A square of vectors turned in registers. */
#ifndef HEADWAY_TRANSPOSE_H
#define HEADWAY_TRANSPOSE_H

#include "common.h"

#define PAIR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
/* Elements i of r[j] and j of r[i] change places: first between neighbours, then between pairs, fours and eights. */
#define STAGE(r, distance, low, high)                                  \
    for (int i = 0; i < LANES; i++) {                                  \
        const int j = i | distance;                                    \
        if (i & distance) continue;                                    \
        const vf a = r[i], b = r[j];                                   \
        r[i] = low;                                                    \
        r[j] = high;                                                   \
    }

INLINE void transpose(vf r[LANES]) {
#if LANES == 16
#pragma GCC unroll 16
    STAGE(r, 1, PAIR(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          PAIR(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
    STAGE(r, 2, PAIR(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          PAIR(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
    STAGE(r, 4, PAIR(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          PAIR(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
    STAGE(r, 8, PAIR(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          PAIR(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANES == 8
#pragma GCC unroll 8
    STAGE(r, 1, PAIR(a, b, 0, 8, 2, 10, 4, 12, 6, 14), PAIR(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#pragma GCC unroll 8
    STAGE(r, 2, PAIR(a, b, 0, 1, 8, 9, 4, 5, 12, 13), PAIR(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#pragma GCC unroll 8
    STAGE(r, 4, PAIR(a, b, 0, 1, 2, 3, 8, 9, 10, 11), PAIR(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#pragma GCC unroll 4
    STAGE(r, 1, PAIR(a, b, 0, 4, 2, 6), PAIR(a, b, 1, 5, 3, 7))
#pragma GCC unroll 4
    STAGE(r, 2, PAIR(a, b, 0, 1, 4, 5), PAIR(a, b, 2, 3, 6, 7))
#endif
}

#undef STAGE
#endif
