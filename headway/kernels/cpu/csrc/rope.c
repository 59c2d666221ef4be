/* rope_kv_write: per-head norm (optional), rotation, and the write of keys and values into the paged cache. */
#include "calls.h"

struct rope {
    const void *qkv, *q_norm, *k_norm;
    const int32_t *positions, *kv_slots;
    const float *cos_sin;
    void *k_cache, *v_cache, *q_out;
    int64_t tokens, heads, kv_heads, size, rot, max_positions, num_slots, tokens_per_item;
    float eps;
    int bf;
};

/* x [size] -> out [size]: norm with weight (or NULL), then rotate the first `rot` elements, half against half. */
INLINE void rotate_head(const struct rope *a, const void *x, const void *weight, const float *cs, void *out, const int bf) {
    const int64_t size = a->size, half = a->rot / 2;
    float buffer[size + LANES] __attribute__((aligned(64)));
    vf squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vf v = load_row(x, i, size - i, bf);
        squares += v * v;
        store(buffer, i, v, 0);
    }
    if (weight) {
        const float scale = 1.0f / sqrtf(sum(squares) / (float)size + a->eps);
        for (int64_t i = 0; i < size; i += LANES) {
            vf v = round_to(load(buffer, i, 0) * scale, bf) * load_row(weight, i, size - i, bf);
            store(buffer, i, round_to(v, bf), 0);
        }
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        vf c = load_row(cs, i, left, 0), s = load_row(cs, half + i, left, 0);
        vf low = load_row(buffer, i, left, 0), high = load_row(buffer, half + i, left, 0);
        store_row(out, i, low * c - high * s, left, bf);
        store_row(out, half + i, high * c + low * s, left, bf);
    }
    for (int64_t i = a->rot; i < size; i += LANES) store_row(out, i, load_row(buffer, i, size - i, 0), size - i, bf);
}

INLINE void rope_token(const struct rope *a, int64_t t, const int bf) {
    const int64_t bytes = bf ? 2 : 4, head = a->size * bytes;
    const char *x = (const char *)a->qkv + t * (a->heads + 2 * a->kv_heads) * head;
    char *q = (char *)a->q_out + t * a->heads * head;
    int64_t position = a->positions[t], slot = a->kv_slots[t];
    if (position < 0) position = 0;
    if (position >= a->max_positions) position = a->max_positions - 1;
    const float *cs = a->cos_sin + position * a->rot;
    for (int64_t h = 0; h < a->heads; h++) rotate_head(a, x + h * head, a->q_norm, cs, q + h * head, bf);
    if (slot < 0 || slot >= a->num_slots) return;
    const char *k = x + a->heads * head;
    char *k_to = (char *)a->k_cache + slot * a->kv_heads * head;
    for (int64_t h = 0; h < a->kv_heads; h++) rotate_head(a, k + h * head, a->k_norm, cs, k_to + h * head, bf);
    memcpy((char *)a->v_cache + slot * a->kv_heads * head, k + a->kv_heads * head, a->kv_heads * head);
}

static void rope_item(void *context, int64_t item) {
    const struct rope *a = context;
    int64_t end = (item + 1) * a->tokens_per_item;
    if (end > a->tokens) end = a->tokens;
    for (int64_t t = item * a->tokens_per_item; t < end; t++)
        if (a->bf) rope_token(a, t, 1);
        else rope_token(a, t, 0);
}

/* qkv [tokens, (heads + 2 kv_heads) * size]; cos_sin [max_positions, rot]; caches [num_slots, kv_heads, size];
 * q_out [tokens, heads, size]. A slot outside [0, num_slots) writes nothing. */
EXPORT void headway_rope_kv_write(const void *qkv, const int32_t *positions, const float *cos_sin, const void *q_norm,
                                  const void *k_norm, float eps, const int32_t *kv_slots, void *k_cache, void *v_cache,
                                  void *q_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t rot,
                                  int64_t max_positions, int64_t num_slots, int bf, int threads) {
    const int64_t work = (heads + 2 * kv_heads) * size;
    struct rope a = {qkv, q_norm, k_norm, positions, kv_slots, cos_sin, k_cache, v_cache, q_out, tokens, heads, kv_heads,
                     size, rot, max_positions, num_slots, work ? 16384 / work + 1 : tokens, eps, bf};
    if (tokens && work) parallel_for((tokens + a.tokens_per_item - 1) / a.tokens_per_item, threads, rope_item, &a);
}
