/* Kernels that others call, as the files that have them declare them. */
#ifndef HEADWAY_CALLS_H
#define HEADWAY_CALLS_H

#include "common.h"

EXPORT int headway_linear(const void *x, const void *packed, const void *bias, void *y, int64_t rows, int64_t outputs,
                          int64_t inputs, int bf, int narrow, int gelu, int threads);
EXPORT int headway_blocks_linear(const void *x, const uint8_t *packed, const void *bias, void *y, const int64_t *parts,
                                 int64_t count, int64_t rows, int64_t inputs, int bf, int exact, int threads);
EXPORT void headway_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t size,
                             float eps, int bf, int threads);
EXPORT void headway_silu_mul(const void *x, void *out, int64_t rows, int64_t size, int bf, int threads);
EXPORT void headway_rope_kv_write(const void *qkv, const int32_t *positions, const float *cos_sin, const void *q_norm,
                                  const void *k_norm, float eps, const int32_t *kv_slots, void *k_cache, void *v_cache,
                                  void *q_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t rot,
                                  int64_t max_positions, int64_t num_slots, int bf, int threads);
EXPORT int headway_paged_attention(const void *q, const void *k_cache, const void *v_cache, const int32_t *tables,
                                   const int32_t *row_slots, const int32_t *query_start, const int32_t *seq_lens, void *out,
                                   int64_t tokens, int64_t rows, int64_t slots, int64_t table_size, int64_t blocks,
                                   int64_t block_size, int64_t heads, int64_t kv_heads, int64_t size, float scale,
                                   int64_t window, float soft_cap, int64_t chunk, const float *sinks, const float *slopes,
                                   int bf, int threads);

#endif
