/* From blocks as GGUF files have them to panels (layout in blocks.h), and from panels to rows of float32 or bfloat16.
 *
 * Layouts of the files' blocks are those of ggml. Sub-scales of K types, 4 or 6 bits in the file, become bytes. */
#include "blocks.h"

#include "common.h"

struct format blocks_format(int type) {
    switch (type) {
#define ONE(type, ...) case type: return FORMAT(type, __VA_ARGS__);
        FORMATS(ONE)
#undef ONE
    }
    return (struct format){0};
}

/* A block or super-block of the file, taken apart. */
struct loose {
    uint8_t q[256];
    uint8_t d[2], min[2];             /* float16 */
    uint8_t scales[16], minima[16];   /* of super-blocks */
};

/* 4 bits of each: first the low nibbles, then the high ones, in runs of `run`. */
static void nibbles(const uint8_t *from, uint8_t *q, int count, int run) {
    for (int i = 0; i < count; i++) q[i] = from[i / (2 * run) * run + i % run] >> (i / run % 2 ? 4 : 0) & 15;
}

static void six_bit_scales(const uint8_t *s, struct loose *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i] = s[i] & 63;
        to->minima[i] = s[i + 4] & 63;
        to->scales[i + 4] = (s[i + 8] & 15) | (s[i] >> 2 & 48);
        to->minima[i + 4] = s[i + 8] >> 4 | (s[i + 4] >> 2 & 48);
    }
}

static void take_apart(const uint8_t *b, int type, struct loose *to) {
    switch (type) {
    case Q4_0: case Q4_1: case IQ4_NL: case Q5_0: case Q5_1: {
        const int has_min = type == Q4_1 || type == Q5_1, five = type == Q5_0 || type == Q5_1;
        memcpy(to->d, b, 2);
        if (has_min) memcpy(to->min, b + 2, 2);
        b += has_min ? 4 : 2;
        nibbles(five ? b + 4 : b, to->q, 32, 16);
        for (int i = 0; five && i < 32; i++) to->q[i] |= (b[i / 8] >> i % 8 & 1) << 4;
        break;
    }
    case Q8_0:
        memcpy(to->d, b, 2);
        memcpy(to->q, b + 2, 32);
        break;
    case Q2_K:
        memcpy(to->scales, b, 16); /* minima in the high nibbles */
        for (int i = 0; i < 256; i++) to->q[i] = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        memcpy(to->d, b + 80, 2);
        memcpy(to->min, b + 82, 2);
        break;
    case Q3_K: {
        const uint8_t *scales = b + 96;
        for (int i = 0; i < 256; i++) {
            to->q[i] = b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
            to->q[i] |= (b[i % 32] >> i / 32 & 1) << 2; /* stored plus 4 */
        }
        for (int i = 0; i < 16; i++)
            to->scales[i] = (uint8_t)((scales[i % 8] >> (i < 8 ? 0 : 4) & 15) + ((scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
        memcpy(to->d, b + 108, 2);
        break;
    }
    case Q4_K: case Q5_K:
        memcpy(to->d, b, 2);
        memcpy(to->min, b + 2, 2);
        six_bit_scales(b + 4, to);
        nibbles(type == Q5_K ? b + 48 : b + 16, to->q, 256, 32);
        for (int i = 0; type == Q5_K && i < 256; i++) to->q[i] |= (b[16 + i % 32] >> i / 32 & 1) << 4;
        break;
    case Q6_K:
        nibbles(b, to->q, 256, 64);
        for (int i = 0; i < 256; i++) to->q[i] |= (b[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
        memcpy(to->scales, b + 192, 16);
        memcpy(to->d, b + 208, 2);
        break;
    case IQ4_XS:
        memcpy(to->d, b, 2);
        for (int i = 0; i < 8; i++)
            to->scales[i] = (uint8_t)((b[4 + i / 2] >> i % 2 * 4 & 15) + (((b[2] | b[3] << 8) >> 2 * i & 3) << 4) - 32);
        nibbles(b + 8, to->q, 256, 16);
        break;
    }
}

/* Puts value v of input k (of 32) and output n (of 16) into zeroed planes. */
INLINE void put(uint8_t *planes, int k, int n, uint8_t v, const struct format f) {
    const int s = k / 4, at = 4 * n + k % 4;
    if (f.bits == 8) {
        planes[s * ROW + at] = v;
        return;
    }
    if (f.bits >= 4) planes[s % 4 * ROW + at] |= (v & 15) << (s < 4 ? 0 : 4);
    if (f.bits < 4) planes[s / 4 * ROW + at] |= (v & 3) << 2 * (s % 4);
    if (f.bits == 3) planes[2 * ROW + at] |= (v >> 2) << s;
    if (f.bits == 5) planes[4 * ROW + at] |= (v >> 4) << s;
    if (f.bits == 6) planes[(4 + s / 4) * ROW + at] |= (v >> 4) << 2 * (s % 4);
}

INLINE uint8_t get(const uint8_t *planes, int k, int n, const struct format f) {
    const int s = k / 4, at = 4 * n + k % 4;
    if (f.bits == 8) return planes[s * ROW + at];
    uint8_t v;
    if (f.bits >= 4) v = planes[s % 4 * ROW + at] >> (s < 4 ? 0 : 4) & 15;
    else v = planes[s / 4 * ROW + at] >> 2 * (s % 4) & 3;
    if (f.bits == 3) v |= (planes[2 * ROW + at] >> s & 1) << 2;
    if (f.bits == 5) v |= (planes[4 * ROW + at] >> s & 1) << 4;
    if (f.bits == 6) v |= (planes[(4 + s / 4) * ROW + at] >> 2 * (s % 4) & 3) << 4;
    return v;
}

INLINE void pack_output(const uint8_t *row, uint8_t *panel, int n, int64_t inputs, const struct format f) {
    const int size = f.super ? 256 : BLOCK;
    for (int64_t b = 0; b < inputs / size; b++) {
        struct loose loose;
        take_apart(row + b * f.file_bytes, f.type, &loose);
        uint8_t *at = panel + b * (f.super ? super_head(f) + 8 * block_bytes(f) : block_bytes(f));
        memcpy(at + 2 * n, loose.d, 2);
        if (f.min) memcpy(at + 2 * (WIDTH + n), loose.min, 2);
        at += super_head(f);
        for (int part = 0; part < size / BLOCK; part++, at += block_bytes(f)) {
            for (int g = 0; f.super && g < f.groups; g++) {
                at[g * WIDTH + n] = loose.scales[part * f.groups + g];
                if (f.min == MIN_U8) at[(f.groups + g) * WIDTH + n] = loose.minima[part * f.groups + g];
            }
            for (int k = 0; k < BLOCK; k++) put(at + block_scales(f), k, n, loose.q[part * BLOCK + k], f);
        }
    }
}

struct pack {
    const uint8_t *rows;
    uint8_t *packed;
    int64_t outputs, inputs;
    struct format f;
};

static void pack_panel(void *context, int64_t p) {
    const struct pack *a = context;
    const struct format f = a->f;
    const int64_t row = a->inputs / (f.super ? 256 : BLOCK) * f.file_bytes, size = panel_bytes(f, a->inputs);
    memset(a->packed + p * size, 0, (size_t)size);
    for (int n = 0; n < WIDTH && p * WIDTH + n < a->outputs; n++) {
        const uint8_t *from = a->rows + (p * WIDTH + n) * row;
        uint8_t *to = a->packed + p * size;
        switch (f.type) {
#define ONE(type, ...) case type: pack_output(from, to, n, a->inputs, FORMAT(type, __VA_ARGS__)); break;
            FORMATS(ONE)
#undef ONE
        }
    }
}

/* Bytes of the panels of a weight [outputs, inputs]; -1: not a type that is known, or no whole blocks. */
EXPORT int64_t headway_blocks_size(int type, int64_t outputs, int64_t inputs) {
    const struct format f = blocks_format(type);
    if (!f.bits || inputs % (f.super ? 256 : BLOCK)) return -1;
    return (outputs + WIDTH - 1) / WIDTH * panel_bytes(f, inputs);
}

/* rows: the weight as the file has it, outputs rows of whole blocks; packed: headway_blocks_size bytes. */
EXPORT void headway_blocks_pack(const uint8_t *rows, uint8_t *packed, int64_t outputs, int64_t inputs, int type, int threads) {
    struct pack a = {rows, packed, outputs, inputs, blocks_format(type)};
    parallel_for((outputs + WIDTH - 1) / WIDTH, threads, pack_panel, &a);
}

INLINE void unpack_output(const uint8_t *panel, int n, int64_t inputs, void *y, int64_t to, int bf, const struct format f) {
    const uint8_t *at = panel, *head = panel;
    for (int64_t b = 0; b < inputs / BLOCK; b++, at += block_bytes(f)) {
        if (f.super && b % 8 == 0) {
            head = at;
            at += super_head(f);
        }
        for (int g = 0; g < f.groups; g++) {
            float scale, min = 0;
            if (!f.super) {
                scale = half_to_float(at + 2 * n);
                if (f.min) min = half_to_float(at + 2 * (WIDTH + n));
            } else {
                const uint8_t s = at[g * WIDTH + n];
                scale = half_to_float(head + 2 * n) * (f.min == MIN_NIBBLE ? (float)(s & 15) : (float)(int8_t)s);
                if (f.min) {
                    const uint8_t m = f.min == MIN_NIBBLE ? s >> 4 : at[(f.groups + g) * WIDTH + n];
                    min = -(half_to_float(head + 2 * (WIDTH + n)) * (float)m);
                }
            }
            for (int k = BLOCK / f.groups * g; k < BLOCK / f.groups * (g + 1); k++) {
                const uint8_t v = get(at + block_scales(f), k, n, f);
                const int q = f.lut ? nonlinear[v] : f.bits == 8 ? (int8_t)v : (int)v - f.offset;
                const float product = scale * (float)q, value = f.min ? product + min : product;
                if (bf) ((uint16_t *)y)[to + b * BLOCK + k] = float_to_bf(value);
                else ((float *)y)[to + b * BLOCK + k] = value;
            }
        }
    }
}

struct look_up {
    const uint8_t *packed;
    const int32_t *ids;
    void *y;
    int64_t count, outputs, inputs;
    int bf;
    struct format f;
};

#define IDS 16

static void look_up_item(void *context, int64_t item) {
    const struct look_up *a = context;
    const struct format f = a->f;
    for (int64_t i = item * IDS; i < a->count && i < (item + 1) * IDS; i++) {
        const int64_t id = a->ids[i];
        if (id < 0 || id >= a->outputs) {
            memset((char *)a->y + i * a->inputs * (a->bf ? 2 : 4), 0, (size_t)a->inputs * (a->bf ? 2 : 4));
            continue;
        }
        const uint8_t *panel = a->packed + id / WIDTH * panel_bytes(f, a->inputs);
        const int lane = (int)(id % WIDTH);
        switch (f.type) {
#define ONE(type, ...) \
    case type: unpack_output(panel, lane, a->inputs, a->y, i * a->inputs, a->bf, FORMAT(type, __VA_ARGS__)); break;
            FORMATS(ONE)
#undef ONE
        }
    }
}

/* y [count, inputs] = rows `ids` of the weight, dequantised; zeros for an id that is not one. bf: y is bfloat16, else float32. */
EXPORT void headway_blocks_rows(const uint8_t *packed, const int32_t *ids, void *y, int64_t count, int64_t outputs, int64_t inputs,
                                int type, int bf, int threads) {
    struct look_up a = {packed, ids, y, count, outputs, inputs, bf, blocks_format(type)};
    parallel_for((count + IDS - 1) / IDS, threads, look_up_item, &a);
}
