/* One panel of a linear layer in blocks. Part of blocks.c, which says by SET how integers are multiplied.
 *
 * Every output is one chain over rising blocks of inputs, and integers are exact: a row has the same bits whatever the other rows
 * are and however many threads work.
 */
#ifndef HEADWAY_BLOCKS_KERNEL_H
#define HEADWAY_BLOCKS_KERNEL_H

#if SET == VNNI_512
#define BYTES 64
#elif SET == PAIRS || SET == VNNI_256
#define BYTES 32
#else
#define BYTES 16
#endif
#define OUTS (BYTES / 4) /* outputs of a vector */

typedef uint8_t vb __attribute__((vector_size(BYTES)));
typedef uint16_t vw __attribute__((vector_size(BYTES)));
typedef int32_t v32 __attribute__((vector_size(BYTES)));
typedef float vr __attribute__((vector_size(BYTES)));
typedef uint8_t vb_mem __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef float vr_mem __attribute__((vector_size(BYTES), aligned(4), may_alias));

/* Fields of bytes: shifts move whole 16-bit words, masks take what came from the neighbour. */
INLINE vb down(vb x, const int by, const uint8_t mask) { return (vb)((vw)x >> by) & mask; }
INLINE vb up(vb x, const int by, const uint8_t mask) { return (vb)((vw)x << by) & mask; }

INLINE vr halves(const uint8_t *at) { /* OUTS float16 */
#if SET == VNNI_512
    return (vr)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif SET == PAIRS || SET == VNNI_256
    return (vr)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif SET == SDOT
    return (vr)vcvt_f32_f16(vld1_f16((const __fp16 *)at));
#else
    vr out;
    for (int i = 0; i < OUTS; i++) out[i] = half_to_float(at + 2 * i);
    return out;
#endif
}

INLINE vr small(const uint8_t *at) { /* OUTS signed bytes */
#if SET == VNNI_512
    return (vr)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif SET == PAIRS || SET == VNNI_256
    return (vr)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
    vr out;
    for (int i = 0; i < OUTS; i++) out[i] = (int8_t)at[i];
    return out;
#endif
}

INLINE vb look_up(vb places) {
#if SET == VNNI_512
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)nonlinear)), (__m512i)places);
#elif SET == PAIRS || SET == VNNI_256
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)nonlinear)), (__m256i)places);
#elif SET == SDOT
    return (vb)vqtbl1q_u8(vld1q_u8((const uint8_t *)nonlinear), (uint8x16_t)places);
#else
    vb out;
    for (int i = 0; i < BYTES; i++) out[i] = (uint8_t)nonlinear[places[i] & 15];
    return out;
#endif
}

/* The eight steps of a block for OUTS outputs; `q` is the first row of the planes, at the outputs' place. */
INLINE void unpack(const uint8_t *q, vb w[8], const struct format f) {
#define AT(row) ((vb) * (const vb_mem *)(q + (row) * ROW))
    if (f.bits == 8)
        for (int s = 0; s < 8; s++) w[s] = AT(s);
    if (f.bits >= 4 && f.bits <= 6)
        for (int s = 0; s < 4; s++) {
            w[s] = AT(s) & 15;
            w[s + 4] = down(AT(s), 4, 15);
        }
    if (f.bits == 2 || f.bits == 3)
        for (int s = 0; s < 8; s++) w[s] = down(AT(s / 4), 2 * (s % 4), 3);
    if (f.bits == 3) { /* bit s to bit 2 */
        const vb high = AT(2);
        for (int s = 0; s < 8; s++) w[s] |= s < 2 ? up(high, 2 - s, 4) : down(high, s - 2, 4);
    }
    if (f.bits == 5) { /* bit s to bit 4 */
        const vb high = AT(4);
        for (int s = 0; s < 8; s++) w[s] |= s < 4 ? up(high, 4 - s, 16) : down(high, s - 4, 16);
    }
    if (f.bits == 6)
        for (int s = 0; s < 8; s++) { /* bits 2 (s % 4) to bits 4 and 5 */
            const int at = 2 * (s % 4);
            w[s] |= at < 4 ? up(AT(4 + s / 4), 4 - at, 48) : down(AT(4 + s / 4), at - 4, 48);
        }
    if (f.lut)
        for (int s = 0; s < 8; s++) w[s] = look_up(w[s]);
#undef AT
}

/* What `products` wants of the eight steps. */
INLINE void prepare(vb w[8], vb magnitude[8], const struct format f) {
#if SET == PAIRS
    for (int s = 0; s < 8; s++) magnitude[s] = is_signed(f) ? (vb)_mm256_abs_epi8((__m256i)w[s]) : w[s];
#elif SET == SDOT
    for (int s = 0; s < 8; s++) w[s] -= (uint8_t)(is_signed(f) ? 0 : centre(f));
#else
    for (int s = 0; s < 8; s++) w[s] ^= (uint8_t)(is_signed(f) ? 128 : 0); /* + 128 */
#endif
}

/* Sums over `steps` steps of (q - centre) * x, exact. `q` are the digits of the first step, start their init. */
INLINE v32 products(const vb *w, const vb *magnitude, const int8_t *q, int32_t start, const int steps, const struct format f) {
#if SET == PAIRS
#define X(s) _mm256_set1_epi32(word_at(q + 4 * (s)))
    if (is_signed(f)) { /* 8 bits: |w| x sign(w), in pairs of at most 2 * 128 * 127 */
        __m256i sum = _mm256_setzero_si256();
        for (int s = 0; s < steps; s++) {
            const __m256i pairs = _mm256_maddubs_epi16((__m256i)magnitude[s], _mm256_sign_epi8(X(s), (__m256i)w[s]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        return (v32)sum;
    }
    __m256i sum = _mm256_set1_epi32(start); /* 16-bit sums may wrap on the way, but end within 16 bits */
    for (int s = 0; s < steps; s++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)w[s], X(s)));
    return (v32)_mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#undef X
#elif SET == VNNI_256
    __m256i even = _mm256_set1_epi32(start), odd = _mm256_setzero_si256();
    for (int s = 0; s < steps; s += 2) {
        even = dot_256(even, (__m256i)w[s], _mm256_set1_epi32(word_at(q + 4 * s)));
        odd = dot_256(odd, (__m256i)w[s + 1], _mm256_set1_epi32(word_at(q + 4 * s + 4)));
    }
    return (v32)_mm256_add_epi32(even, odd);
#elif SET == VNNI_512
    __m512i even = _mm512_set1_epi32(start), odd = _mm512_setzero_si512();
    for (int s = 0; s < steps; s += 2) {
        even = _mm512_dpbusd_epi32(even, (__m512i)w[s], _mm512_set1_epi32(word_at(q + 4 * s)));
        odd = _mm512_dpbusd_epi32(odd, (__m512i)w[s + 1], _mm512_set1_epi32(word_at(q + 4 * s + 4)));
    }
    return (v32)_mm512_add_epi32(even, odd);
#elif SET == SDOT
    int32x4_t sum = vdupq_n_s32(0);
    for (int s = 0; s < steps; s += 4) {
        const int8x16_t x = vld1q_s8(q + 4 * s);
        sum = vdotq_laneq_s32(sum, (int8x16_t)w[s], x, 0);
        sum = vdotq_laneq_s32(sum, (int8x16_t)w[s + 1], x, 1);
        sum = vdotq_laneq_s32(sum, (int8x16_t)w[s + 2], x, 2);
        sum = vdotq_laneq_s32(sum, (int8x16_t)w[s + 3], x, 3);
    }
    return (v32)sum;
#else
    v32 sum = start - (v32){0};
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < OUTS; i++)
            for (int k = 0; k < 4; k++) sum[i] += (int32_t)w[s][4 * i + k] * q[4 * s + k];
    return sum;
#endif
}

/* What a digit of x adds to OUTS outputs, x being about d times it. */
INLINE vr digit_sums(const vb *w, const vb *magnitude, const struct digits *x, const float d, const vr scale[2],
                     const struct format f) {
    if (f.groups == 1) return __builtin_convertvector(products(w, magnitude, x->q, x->init[0], 8, f), vr) * d * scale[0];
    const v32 a = products(w, magnitude, x->q, x->init[0], 4, f), z = products(w + 4, magnitude + 4, x->q + 16, x->init[1], 4, f);
    return __builtin_convertvector(a, vr) * d * scale[0] + __builtin_convertvector(z, vr) * d * scale[1];
}

/* Scales and minima of OUTS outputs from place `from` of the panel, for values of which `moved` was taken off. */
INLINE void scales(const uint8_t *head, const uint8_t *block, int from, vr scale[2], vr min[2], const int moved,
                   const struct format f) {
    for (int g = 0; g < f.groups; g++) {
        if (!f.super) {
            scale[g] = halves(block + 2 * from);
            if (f.min) min[g] = halves(block + 2 * (WIDTH + from));
        } else if (f.min == MIN_NIBBLE) {
            uint8_t low[OUTS], high[OUTS];
            for (int i = 0; i < OUTS; i++) {
                low[i] = block[g * WIDTH + from + i] & 15;
                high[i] = block[g * WIDTH + from + i] >> 4;
            }
            scale[g] = halves(head + 2 * from) * small(low);
            min[g] = -(halves(head + 2 * (WIDTH + from)) * small(high));
        } else {
            scale[g] = halves(head + 2 * from) * small(block + g * WIDTH + from);
            if (f.min)
                min[g] = -(halves(head + 2 * (WIDTH + from)) * small(block + (f.groups + g) * WIDTH + from));
        }
        if (f.min && moved) min[g] += scale[g] * (float)moved;
    }
}

INLINE void one_panel(const struct blocks_job *job, int64_t panel, int64_t first, int64_t rows, const struct format f) {
    float sums[ROWS_AT_ONCE * WIDTH] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)rows * WIDTH * sizeof *sums);
    const uint8_t *at = job->packed + panel * panel_bytes(f, job->inputs), *head = at;
    for (int64_t b = 0; b < job->inputs / BLOCK; b++) {
        const struct activation *x = job->x + b * job->rows + first;
        const struct digits *low = job->low + b * job->rows + first;
        if (f.super && b % 8 == 0) {
            head = at;
            at += super_head(f);
        }
        for (int line = 0; line < block_bytes(f); line += 64) __builtin_prefetch(at + AHEAD + line, 0, 2);
#pragma GCC unroll 4
        for (int from = 0; from < WIDTH; from += OUTS) {
            vb w[8] = {{0}}, magnitude[8] = {{0}};
            vr scale[2] = {{0}}, min[2] = {{0}};
            unpack(at + block_scales(f) + 4 * from, w, f);
            prepare(w, magnitude, f);
            scales(head, at, from, scale, min, centre(f), f);
            for (int64_t r = 0; r < rows; r++) {
                vr_mem *to = (vr_mem *)(sums + r * WIDTH + from);
                vr sum = (vr)*to;
                sum += digit_sums(w, magnitude, &x[r].high, x[r].d, scale, f);
                if (f.min) sum += f.groups == 1 ? min[0] * x[r].sum : min[0] * x[r].half_sum[0] + min[1] * x[r].half_sum[1];
                if (x[r].fine) sum += digit_sums(w, magnitude, low + r, x[r].d * (1.0f / BASE), scale, f);
                *to = sum;
            }
        }
        at += block_bytes(f);
    }
    if (job->bf) finish(job, panel, first, rows, sums, WIDTH, 1);
    else finish(job, panel, first, rows, sums, WIDTH, 0);
}

/* What the weights of a block are made of, for OUTS outputs. */
struct values {
    const uint8_t *rows; /* of the planes, at the outputs' place */
    vb steps[8];         /* bytes, unless fields of 4 bits are taken from the rows */
    vr by[2], base[2];
};

#define FROM_ROWS(f) ((f).bits == 4 && (SET == VNNI_512 || !(f).lut))

INLINE struct values values_of(const uint8_t *head, const uint8_t *at, int from, const struct format f) {
    struct values v = {.rows = at + block_scales(f) + 4 * from};
    if (!FROM_ROWS(f)) unpack(v.rows, v.steps, f);
    scales(head, at, from, v.by, v.base, 0, f);
    if (!f.min)
        for (int g = 0; g < f.groups; g++) v.base[g] = v.by[g] * (float)-f.offset;
    return v;
}

/* Weights of input k < 32, k a constant. A scale times a value takes no more than 24 bits, so the one rounding is that of the
 * file's formula. */
INLINE vr value(const struct values *v, const int k, const struct format f) {
    const int s = k / 4, at = 8 * (k % 4), group = f.groups == 2 ? k / 16 : 0; /* bytes of a word are inputs */
    vr q;
    if (FROM_ROWS(f)) {
        const v32 word = (v32) * (const vb_mem *)(v->rows + s % 4 * ROW) >> (at + s / 4 * 4);
#if SET == VNNI_512 /* the table is read by the low 4 bits */
        const __m128i table = f.lut ? _mm_loadu_si128((const __m128i *)nonlinear)
                                    : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        q = (vr)_mm512_permutexvar_ps((__m512i)word, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(table)));
#else
        q = __builtin_convertvector(word & 15, vr);
#endif
    } else if (is_signed(f)) q = __builtin_convertvector((v32)v->steps[s] << (24 - at) >> 24, vr);
    else q = __builtin_convertvector((v32)v->steps[s] >> at & 255, vr);
    return q * v->by[group] + v->base[group];
}

/* [32, PANEL] <- a block, from place `from` of a panel on. */
INLINE void widen_block(const uint8_t *head, const uint8_t *at, int from, float *wide, const struct format f) {
    const struct values v = values_of(head, at, from, f);
#pragma GCC unroll 32
    for (int k = 0; k < BLOCK; k++) *(vr_mem *)(wide + k * PANEL + from) = value(&v, k, f);
}

#define OF_PANEL (WIDTH / OUTS)

/* One row times a block of two panels. */
INLINE void exact_block(const uint8_t *const head[2], const uint8_t *const at[2], const float *x, vr acc[2][OF_PANEL],
                        const struct format f) {
    struct values v[2][OF_PANEL];
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++)
#pragma GCC unroll 4
        for (int c = 0; c < OF_PANEL; c++) v[side][c] = values_of(head[side], at[side], c * OUTS, f);
#pragma GCC unroll 32
    for (int k = 0; k < BLOCK; k++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) /* sums of several outputs hide each other's latency */
#pragma GCC unroll 4
            for (int c = 0; c < OF_PANEL; c++) acc[side][c] += value(&v[side][c], k, f) * x[k];
}

/* Where two panels, of which the second may be missing, are read from. */
struct cursor {
    const uint8_t *at[2], *head[2];
};

INLINE struct cursor start_of(const struct blocks_job *job, int64_t pair, const struct format f) {
    struct cursor c = {{NULL, NULL}, {NULL, NULL}};
    const int64_t panels = (job->outputs + WIDTH - 1) / WIDTH;
    for (int side = 0; side < 2; side++) /* a missing one is the first again, and its sums are nobody's */
        c.at[side] = job->packed + (pair * 2 + side < panels ? pair * 2 + side : pair * 2) * panel_bytes(f, job->inputs);
    return c;
}

/* Before block `b`; behind it `at` moves by block_bytes. */
INLINE void enter_block(struct cursor *c, int64_t b, const struct format f) {
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        if (f.super && b % 8 == 0) {
            c->head[side] = c->at[side];
            c->at[side] += super_head(f);
        }
        for (int line = 0; line < block_bytes(f); line += 64) __builtin_prefetch(c->at[side] + AHEAD + line, 0, 2);
    }
}

/* Two panels. x is not rounded: each output is the chain of multiply-adds over rising inputs that it is in linear.c with float32
 * weights, from the bytes of the blocks. */
INLINE void exact_panels(const struct blocks_job *job, int64_t pair, int64_t first, int64_t rows, const struct format f) {
    float sums[EXACT_ROWS * PANEL] __attribute__((aligned(64)));
    const int64_t blocks = job->inputs / BLOCK, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const float *x = job->exact + first * job->inputs;
    struct cursor c = start_of(job, pair, f);
    if (rows == 1) {
        vr acc[2][OF_PANEL] = {{{0}}};
        for (int64_t b = 0; b < blocks; b++) {
            enter_block(&c, b, f);
            exact_block(c.head, c.at, x + b * BLOCK, acc, f);
            for (int side = 0; side < 2; side++) c.at[side] += block_bytes(f);
        }
        memcpy(sums, acc, sizeof acc);
    } else {
        float wide[EXACT_BLOCKS * BLOCK * PANEL] __attribute__((aligned(64)));
        for (int64_t b = 0; b < blocks; b += EXACT_BLOCKS) {
            const int64_t now = least(blocks - b, EXACT_BLOCKS);
            for (int64_t i = 0; i < now; i++) {
                enter_block(&c, b + i, f);
                for (int side = 0; side < 2; side++) {
#pragma GCC unroll 4
                    for (int from = 0; from < WIDTH; from += OUTS)
                        widen_block(c.head[side], c.at[side], from, wide + i * BLOCK * PANEL + side * WIDTH, f);
                    c.at[side] += block_bytes(f);
                }
            }
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t r = rows * t / tiles, end = rows * (t + 1) / tiles;
                float_tile((int)(end - r), (const char *)(x + r * job->inputs + b * BLOCK), job->inputs * 4, (const char *)wide,
                           now * BLOCK, (const char *)wide, 0, sums + r * PANEL, b > 0);
            }
        }
    }
    for (int64_t side = 0; side < 2 && (pair * 2 + side) * WIDTH < job->outputs; side++)
        finish(job, pair * 2 + side, first, rows, sums + side * WIDTH, PANEL, 0);
}

#if SET == PLAIN /* one function for all types: small, and slow anyway */
static void panel_any(const struct blocks_job *job, int64_t panel, int64_t first, int64_t rows) {
    if (job->exact) exact_panels(job, panel, first, rows, job->format);
    else one_panel(job, panel, first, rows, job->format);
}

static panel_kernel kernel_of(int type) { return panel_any; }
#else
#define ONE(type, bits, super, groups, min, offset, lut, bytes)                                                      \
    static void panel_##type(const struct blocks_job *job, int64_t panel, int64_t first, int64_t rows) {       \
        const struct format f = FORMAT(type, bits, super, groups, min, offset, lut, bytes);                         \
        if (job->exact) exact_panels(job, panel, first, rows, f);                                                   \
        else one_panel(job, panel, first, rows, f);                                                                 \
    }
FORMATS(ONE)
#undef ONE

static panel_kernel kernel_of(int type) {
    switch (type) {
#define ONE(type, ...) case type: return panel_##type;
        FORMATS(ONE)
#undef ONE
    }
    return NULL;
}
#endif

#endif
