/* Runs one native kernel on the inputs of a file, for instruction sets that only an emulator has.
 *
 * driver OPERATION < inputs > outputs. Inputs: arrays, each an int64 count of bytes and the bytes; the first one holds the
 * operation's integers as int64, the second its reals as double. Outputs: the bytes of the arrays it wrote. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 32

int headway_linear(const void *, const void *, const void *, void *, int64_t, int64_t, int64_t, int, int, int, int);
void headway_linear_pack(const void *, void *, int64_t, int64_t, int, int);
void headway_rms_norm(const void *, void *, const void *, void *, int64_t, int64_t, float, int, int);
void headway_silu_mul(const void *, void *, int64_t, int64_t, int, int);
void headway_rope_kv_write(const void *, const int32_t *, const float *, const void *, const void *, float, const int32_t *,
                           void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int);
int headway_paged_attention(const void *, const void *, const void *, const int32_t *, const int32_t *, const int32_t *,
                            const int32_t *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, float, int64_t, float, int64_t, const float *, const float *, int, int);
int headway_sample(const void *, const int32_t *, const float *, const int32_t *, const float *, const float *,
                   const int32_t *, const int32_t *, int32_t *, int64_t, int64_t, int64_t, int64_t, float, int, int, int);
int headway_gather_logprobs(const void *, const int32_t *, const int32_t *, const int32_t *, const int32_t *, const int32_t *,
                            int32_t *, float *, int32_t *, int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int, int);

static void *arrays[MOST];
static int64_t sizes[MOST];

static void fail(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

static void read_arrays(void) {
    for (int i = 0; i < MOST; i++) {
        if (fread(&sizes[i], 8, 1, stdin) != 1) return;
        if (!(arrays[i] = malloc(sizes[i] + 64))) fail("no memory");
        memset(arrays[i], 0x7f, sizes[i] + 64);
        if (fread(arrays[i], 1, sizes[i], stdin) != (size_t)sizes[i]) fail("short input");
    }
}

static void give(int i) {
    if (fwrite(arrays[i], 1, sizes[i], stdout) != (size_t)sizes[i]) fail("short output");
}

int main(int argc, char **argv) {
    if (argc != 2) fail("which operation?");
    read_arrays();
    const int64_t *n = arrays[0];
    const double *x = arrays[1];
    void **a = arrays + 2;
    const char *name = argv[1];
    if (!strcmp(name, "linear")) { /* x, weight, bias, packed, y */
        headway_linear_pack(a[1], a[3], n[1], n[2], (int)n[4], 2);
        if (headway_linear(a[0], a[3], sizes[4] ? a[2] : NULL, a[4], n[0], n[1], n[2], (int)n[3], (int)n[4], 0, 2)) fail("failed");
        give(6);
    } else if (!strcmp(name, "rms_norm")) { /* x, residual, weight, out */
        headway_rms_norm(a[0], a[1], a[2], a[3], n[0], n[1], (float)x[0], (int)n[2], 2);
        give(3), give(5);
    } else if (!strcmp(name, "silu_mul")) { /* x, out */
        headway_silu_mul(a[0], a[1], n[0], n[1], (int)n[2], 2);
        give(3);
    } else if (!strcmp(name, "rope_kv_write")) { /* qkv, positions, cos_sin, q_norm, k_norm, slots, k, v, out */
        headway_rope_kv_write(a[0], a[1], a[2], a[3], a[4], (float)x[0], a[5], a[6], a[7], a[8], n[0], n[1], n[2], n[3], n[4],
                              n[5], n[6], (int)n[7], 2);
        give(8), give(9), give(10);
    } else if (!strcmp(name, "paged_attention")) { /* q, k, v, tables, row_slots, query_start, seq_lens, out, sinks, slopes */
        if (headway_paged_attention(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], n[0], n[1], n[2], n[3], n[4], n[5], n[6],
                                    n[7], n[8], (float)x[0], n[9], (float)x[1], n[11], sizes[10] ? a[8] : NULL, sizes[11] ? a[9] : NULL,
                                    (int)n[10], 2)) fail("failed");
        give(9);
    } else if (!strcmp(name, "sample")) { /* logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, out */
        if (headway_sample(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], n[0], n[1], n[2], n[3], (float)x[0], (int)n[4],
                           (int)n[5], 2)) fail("failed");
        give(10);
    } else if (!strcmp(name, "gather_logprobs")) { /* logits, tokens, slots, num, counts, table, ids, logprobs, ranks, counts */
        if (headway_gather_logprobs(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], n[0], n[1], n[2], n[3], n[4], n[5],
                                    (int)n[6], 2)) fail("failed");
        give(8), give(9), give(10), give(11);
    } else fail("unknown operation");
    return 0;
}
