/* Encoders on a CPU: residual + layer norm in one pass, and attention both ways within each text, without padding. */
#include "transpose.h"

#define MIN_ELEMENTS 32768 /* as in norm.c */
#define QUERIES 6          /* queries that share what is read of keys and values: 12 registers accumulate */
#define MOST_KEYS 512      /* longer texts are not for this kernel; headway/kernels/dense_attention/host.py knows the number */
#define MOST_SIZE 128

struct norm {
    const void *x, *weight, *bias;
    void *residual, *out;
    int64_t rows, size, rows_per_item;
    float eps;
    int bf;
};

/* residual += x; out = (residual - mean) / sqrt(variance + eps) * weight + bias, sums in float32 over lanes and then folded. */
INLINE void norm_row(const struct norm *a, int64_t row, const int bf) {
    const int64_t base = row * a->size, size = a->size;
    vf total = {0}, squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        vf x = round_to(load_row(a->residual, base + i, left, bf) + load_row(a->x, base + i, left, bf), bf);
        store_row(a->residual, base + i, x, left, bf);
        total += x;
    }
    const float mean = sum(total) / (float)size;
    for (int64_t i = 0; i < size; i += LANES) {
        vf apart = load_row(a->residual, base + i, size - i, bf) - mean;
        if (size - i < LANES)
            for (int64_t j = size - i; j < LANES; j++) apart[j] = 0;
        squares += apart * apart;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / (float)size + a->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const vf shift = a->bias ? load_row(a->bias, i, left, bf) : (vf){0};
        const vf x = (load_row(a->residual, base + i, left, bf) - mean) * scale;
        store_row(a->out, base + i, x * load_row(a->weight, i, left, bf) + shift, left, bf);
    }
}

static void norm_item(void *context, int64_t item) {
    const struct norm *a = context;
    const int64_t end = least((item + 1) * a->rows_per_item, a->rows);
    for (int64_t row = item * a->rows_per_item; row < end; row++)
        if (a->bf) norm_row(a, row, 1);
        else norm_row(a, row, 0);
}

/* x, residual, out [rows, size]; weight [size]; bias [size] or NULL. */
EXPORT void headway_add_layer_norm(const void *x, void *residual, const void *weight, const void *bias, void *out,
                                   int64_t rows, int64_t size, float eps, int bf, int threads) {
    struct norm a = {x, weight, bias, residual, out, rows, size, size ? MIN_ELEMENTS / 4 / size + 1 : rows, eps, bf};
    if (rows && size) parallel_for((rows + a.rows_per_item - 1) / a.rows_per_item, threads, norm_item, &a);
}

struct dense {
    const void *qkv;
    const int32_t *starts;
    void *out;
    int64_t heads, kv_heads, size, most;
    float scale;
    int bf;
};

/* What one text's head works on: keys by number [size, padded], values by token [keys, size], scores [QUERIES, padded]. */
struct scratch {
    float keys[MOST_SIZE * MOST_KEYS] __attribute__((aligned(64)));
    float values[MOST_KEYS * MOST_SIZE] __attribute__((aligned(64)));
    float scores[QUERIES * MOST_KEYS] __attribute__((aligned(64)));
    float queries[QUERIES * MOST_SIZE] __attribute__((aligned(64)));
};

/* `m` queries against all keys, two vectors of keys at a time, each score one chain over the head's numbers. */
INLINE void score(const int m, struct scratch *s, int64_t size, int64_t padded) {
    for (int64_t j = 0; j < padded; j += 2 * LANES) {
        vf acc[QUERIES][2];
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) acc[i][0] = acc[i][1] = (vf){0};
        for (int64_t d = 0; d < size; d++) {
            const vf k0 = load(s->keys, d * padded + j, 0), k1 = load(s->keys, d * padded + j + LANES, 0);
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) {
                const float q = s->queries[i * size + d];
                acc[i][0] += k0 * q;
                acc[i][1] += k1 * q;
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) {
            store(s->scores, i * padded + j, acc[i][0], 0);
            store(s->scores, i * padded + j + LANES, acc[i][1], 0);
        }
    }
}

/* scores <- e^(score - greatest), and their sum; places from `keys` on get 0. */
INLINE float softmax(float *scores, int64_t keys, int64_t padded) {
    for (int64_t j = keys; j < padded; j++) scores[j] = -INFINITY;
    vf most = splat(-INFINITY), total = {0};
    for (int64_t j = 0; j < padded; j += LANES) most = vmax(most, load(scores, j, 0));
    const float greatest = max_lane(most);
    for (int64_t j = 0; j < padded; j += LANES) {
        const vf e = vexp(load(scores, j, 0) - greatest);
        store(scores, j, e, 0);
        total += e;
    }
    return sum(total);
}

/* out = weights V / total for `m` queries, two vectors of a head at a time, each number one chain over the keys. */
INLINE void mix(const int m, const struct dense *a, struct scratch *s, int64_t keys, int64_t padded, const float *totals,
                int64_t out_at, int64_t out_stride, const int bf) {
    for (int64_t d = 0; d < a->size; d += 2 * LANES) {
        const int both = d + LANES < a->size;
        vf acc[QUERIES][2];
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) acc[i][0] = acc[i][1] = (vf){0};
        for (int64_t j = 0; j < keys; j++) {
            const vf v0 = load(s->values, j * a->size + d, 0);
            const vf v1 = both ? load(s->values, j * a->size + d + LANES, 0) : (vf){0};
#pragma GCC unroll 6
            for (int i = 0; i < m; i++) {
                const float p = s->scores[i * padded + j];
                acc[i][0] += v0 * p;
                acc[i][1] += v1 * p;
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) {
            store(a->out, out_at + i * out_stride + d, acc[i][0] / totals[i], bf);
            if (both) store(a->out, out_at + i * out_stride + d + LANES, acc[i][1] / totals[i], bf);
        }
    }
}

#define CASE(n) \
    case n: \
        score(n, s, a->size, padded); \
        for (int i = 0; i < n; i++) totals[i] = softmax(s->scores + i * padded, keys, padded); \
        mix(n, a, s, keys, padded, totals, out_at, out_stride, bf); \
        break;

INLINE void attend(const struct dense *a, int64_t row, int64_t head, struct scratch *s, const int bf) {
    const int64_t first = a->starts[row], keys = a->starts[row + 1] - first, size = a->size;
    const int64_t padded = (keys + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    const int64_t stride = (a->heads + 2 * a->kv_heads) * size, kv = head / (a->heads / a->kv_heads);
    const int64_t key_at = first * stride + (a->heads + kv) * size, value_at = key_at + a->kv_heads * size;
    for (int64_t j = 0; j < padded; j += LANES)
        for (int64_t d = 0; d < size; d += LANES) {
            vf k[LANES];
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++)
                k[lane] = j + lane < keys ? load(a->qkv, key_at + (j + lane) * stride + d, bf) : (vf){0};
            transpose(k);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) store(s->keys, (d + lane) * padded + j, k[lane], 0);
        }
    for (int64_t j = 0; j < keys; j++)
        for (int64_t d = 0; d < size; d += LANES) store(s->values, j * size + d, load(a->qkv, value_at + j * stride + d, bf), 0);
    const int64_t blocks = (keys + QUERIES - 1) / QUERIES, out_stride = a->heads * size;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t q0 = keys * b / blocks, q1 = keys * (b + 1) / blocks;
        const int64_t out_at = (first + q0) * out_stride + head * size;
        float totals[QUERIES];
        for (int64_t i = 0; i < q1 - q0; i++)
            for (int64_t d = 0; d < size; d += LANES)
                store(s->queries, i * size + d, load(a->qkv, (first + q0 + i) * stride + head * size + d, bf) * a->scale, 0);
        switch (q1 - q0) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
    }
}

static void attend_item(void *context, int64_t item) {
    const struct dense *a = context;
    const int64_t row = item / a->heads, head = item % a->heads;
    struct scratch s;
    if (a->starts[row + 1] <= a->starts[row] || a->starts[row + 1] - a->starts[row] > a->most) return;
    if (a->bf) attend(a, row, head, &s, 1);
    else attend(a, row, head, &s, 0);
}

/* qkv [T, (heads + 2 kv_heads) * size], starts [rows + 1], out [T, heads * size]; size is a multiple of LANES up to MOST_SIZE. Rows of
 * more than `most` <= MOST_KEYS tokens are left out: nothing is written for them. Returns LANES. */
EXPORT int headway_dense_attention(const void *qkv, const int32_t *starts, void *out, int64_t rows, int64_t heads,
                                   int64_t kv_heads, int64_t size, int64_t most, float scale, int bf, int threads) {
    struct dense a = {qkv, starts, out, heads, kv_heads, size, most, scale, bf};
    if (rows) parallel_for(rows * heads, threads, attend_item, &a);
    return LANES;
}
