/* Weights in the blocks of GGUF files, repacked in panels of 16 outputs. Shared by blocks.c, blocks_pack.c and blocks_kernel.h.
 *
 * A panel holds, for 32 inputs ("a block") at a time, what its 16 outputs need for them:
 *
 *   types with scales of their own (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL)      types in super-blocks of 256 inputs
 *   for every block:                                                           for every super-block:
 *     scales  float16 [16]                                                       d     float16 [16]
 *     minima  float16 [16], if the type has them                                 dmin  float16 [16], if it has minima
 *     planes                                                                     8 blocks of: scales 8 bits [groups, 16],
 *                                                                                minima [groups, 16] if any, planes
 *
 * groups is 1 or 2: a scale serves 32 or 16 inputs. Q2_K keeps minima in the high nibble of its scales.
 * Planes: a word of 4 bytes holds 4 neighbouring inputs of an output, a row of 16 words is one step, 8 steps are a block.
 * Bit fields of a step's byte lie in these rows of 64 bytes:
 *
 *   8 bits          row s = step s
 *   low 4 bits      row s, s < 4: step s in the low nibble, step s + 4 in the high one
 *   2 bits          row s / 4, bits 2 (s % 4) and the next: the values of 2-bit types, the low bits of 3, the high bits of 6
 *   1 bit           one row, bit s: the highest bit of 3- and 5-bit types
 *
 * A weight is scale * (q - offset) [+ minimum]; minima keep the sign of the file's formula: + for Q4_1 and Q5_1, - for K types.
 */
#ifndef HEADWAY_BLOCKS_H
#define HEADWAY_BLOCKS_H

#include <stdint.h>
#include <string.h>

#define WIDTH 16 /* outputs of a panel */
#define BLOCK 32 /* inputs of a block */
#define ROW 64   /* bytes of a row of a plane */

enum { NO_MIN, MIN_F16, MIN_U8, MIN_NIBBLE };

struct format {
    int type;   /* ggml's number */
    int bits;   /* of a stored value */
    int super;  /* scales are integers times a float16 of 256 inputs */
    int groups; /* scales of a block */
    int min;
    int offset; /* what stands for zero */
    int lut;    /* values are places in a table */
    int file_bytes; /* of a block or super-block in the file */
};

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
       Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23 };

/* type, bits, super, groups, min, offset, lut, bytes in the file. Values of 8-bit types and of tables are signed. */
#define FORMATS(X)                               \
    X(Q4_0, 4, 0, 1, NO_MIN, 8, 0, 18)           \
    X(Q4_1, 4, 0, 1, MIN_F16, 0, 0, 20)          \
    X(Q5_0, 5, 0, 1, NO_MIN, 16, 0, 22)          \
    X(Q5_1, 5, 0, 1, MIN_F16, 0, 0, 24)          \
    X(Q8_0, 8, 0, 1, NO_MIN, 0, 0, 34)           \
    X(Q2_K, 2, 1, 2, MIN_NIBBLE, 0, 0, 84)       \
    X(Q3_K, 3, 1, 2, NO_MIN, 4, 0, 110)          \
    X(Q4_K, 4, 1, 1, MIN_U8, 0, 0, 144)          \
    X(Q5_K, 5, 1, 1, MIN_U8, 0, 0, 176)          \
    X(Q6_K, 6, 1, 2, NO_MIN, 32, 0, 210)         \
    X(IQ4_NL, 4, 0, 1, NO_MIN, 0, 1, 18)         \
    X(IQ4_XS, 4, 1, 1, NO_MIN, 0, 1, 136)

#define FORMAT(type, bits, super, groups, min, offset, lut, bytes) \
    ((struct format){type, bits, super, groups, min, offset, lut, bytes})

#define BLOCKS_INLINE static inline __attribute__((always_inline))

BLOCKS_INLINE int plane_bytes(struct format f) { return f.bits * ROW; }
BLOCKS_INLINE int block_scales(struct format f) {
    if (f.super) return WIDTH * f.groups * (f.min == MIN_U8 ? 2 : 1);
    return WIDTH * (f.min == MIN_F16 ? 4 : 2);
}
BLOCKS_INLINE int block_bytes(struct format f) { return block_scales(f) + plane_bytes(f); }
BLOCKS_INLINE int super_head(struct format f) { return f.super ? WIDTH * (f.min ? 4 : 2) : 0; }
BLOCKS_INLINE int64_t panel_bytes(struct format f, int64_t inputs) {
    return inputs / BLOCK * block_bytes(f) + (f.super ? inputs / 256 * super_head(f) : 0);
}

#define BASE 254 /* of two digits from -127 to 127 */

/* 32 numbers of a byte. */
struct digits {
    int8_t q[BLOCK];
    int16_t pairs[2][2]; /* sums of q over a half: of places 0 and 1, of places 2 and 3 of every 4 */
    int32_t init[2];     /* what a half's sum of products starts from (one start in [0] if a scale serves the block) */
};

/* A row of x in 32 inputs, rounded to 8 bits: x is about d * high.q. Where that is coarse for the row, x has a second digit: it is
 * about d * (high.q + low.q / BASE). */
struct activation {
    struct digits high;
    float d;
    float sum, half_sum[2]; /* of what x is about, over the block, its first and its second 16 */
    int fine;               /* x has a second digit */
};

struct blocks_job {
    const struct activation *x; /* [inputs / 32, rows] */
    const struct digits *low;   /* the same, where x has a second digit */
    const float *exact;         /* [rows, inputs], not rounded */
    const uint8_t *packed;
    const void *bias;
    void *y;                    /* rows of `stride` elements */
    int64_t rows, outputs, inputs, stride;
    int bf;                     /* y and bias are bfloat16, else float32 */
    struct format format;
};

#define ROWS_AT_ONCE 64
#define EXACT_ROWS 192 /* that share what is widened once */
#define EXACT_BLOCKS 4 /* widened at once, for two panels: 16 KiB */

/* One panel for `rows` <= ROWS_AT_ONCE rows from `first` on. Where the job has `exact`, a pair of panels for up to EXACT_ROWS. */
typedef void (*panel_kernel)(const struct blocks_job *job, int64_t panel, int64_t first, int64_t rows);

struct format blocks_format(int type); /* bits 0: not known */

/* The values of IQ4 types. */
static const int8_t nonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

BLOCKS_INLINE float half_to_float(const uint8_t *at) {
    uint16_t h;
    memcpy(&h, at, 2);
    union { uint32_t u; float f; } c = {.u = (uint32_t)(h & 0x7fff) << 13};
    c.f *= 0x1p112f;
    if ((h & 0x7c00) == 0x7c00) c.u |= 0x7f800000;
    c.u |= (uint32_t)(h & 0x8000) << 16;
    return c.f;
}

#endif
