/* Blocks of a decoder one after the other in one call.
 *
 * From Python a block takes eight calls, whose arguments cost more than the small kernels behind them: of a step of one row a
 * third and more. What runs is the same kernels in the same order, so results have the same bits. headway/kernels/cpu/layers.py
 * fills the structs. */
#include "calls.h"

/* A product from panels (linear.c), or with `parts` from GGUF blocks (blocks.c). */
struct product {
    const void *packed, *bias;
    const int64_t *parts;
    int64_t num_parts, outputs, inputs;
    int32_t narrow, exact;
};

struct block {
    struct product qkv, out, gate_up, down;
    const void *before_ffn, *following, *q_norm, *k_norm; /* weights of norms; the last two may be NULL */
    const float *cos_sin, *sinks, *slopes;
    void *k_cache, *v_cache;
    int64_t group, heads, kv_heads, size, rot, positions, num_blocks, block_size, window, chunk;
    float eps_ffn, eps_following, eps_heads, scale, soft_cap;
    int32_t unused;
};

/* What a step has of one cache group. */
struct group {
    const int32_t *tables, *kv_slots, *seq_lens;
    int64_t slots, table_size;
};

struct step {
    const struct group *groups;
    const int32_t *positions, *row_slots, *query_start;
    void *residual, *normed;                  /* [tokens, hidden] */
    void *wide, *inner, *attended;            /* room for each token's widest product in, inner and queries, heads */
    int64_t tokens, rows, hidden;
    int32_t bf, threads;
};

static int multiply(const struct product *p, const void *x, void *y, const struct step *s) {
    if (p->parts)
        return headway_blocks_linear(x, p->packed, p->bias, y, p->parts, p->num_parts, s->tokens, p->inputs, s->bf, p->exact,
                                     s->threads);
    return headway_linear(x, p->packed, p->bias, y, s->tokens, p->outputs, p->inputs, s->bf, p->narrow, 0, s->threads);
}

static int run_block(const struct block *b, const struct step *s, const void *normed) {
    const struct group *g = s->groups + b->group;
    if (multiply(&b->qkv, normed, s->wide, s)) return -1;
    headway_rope_kv_write(s->wide, s->positions, b->cos_sin, b->q_norm, b->k_norm, b->eps_heads, g->kv_slots, b->k_cache,
                          b->v_cache, s->inner, s->tokens, b->heads, b->kv_heads, b->size, b->rot, b->positions,
                          b->num_blocks * b->block_size, s->bf, s->threads);
    if (headway_paged_attention(s->inner, b->k_cache, b->v_cache, g->tables, s->row_slots, s->query_start, g->seq_lens,
                                s->attended, s->tokens, s->rows, g->slots, g->table_size, b->num_blocks, b->block_size,
                                b->heads, b->kv_heads, b->size, b->scale, b->window, b->soft_cap, b->chunk, b->sinks,
                                b->slopes, s->bf, s->threads))
        return -1;
    if (multiply(&b->out, s->attended, s->wide, s)) return -1;
    headway_rms_norm(s->wide, s->residual, b->before_ffn, s->normed, s->tokens, s->hidden, b->eps_ffn, s->bf, s->threads);
    if (multiply(&b->gate_up, s->normed, s->wide, s)) return -1;
    headway_silu_mul(s->wide, s->inner, s->tokens, b->down.inputs, s->bf, s->threads);
    if (multiply(&b->down, s->inner, s->wide, s)) return -1;
    headway_rms_norm(s->wide, s->residual, b->following, s->normed, s->tokens, s->hidden, b->eps_following, s->bf, s->threads);
    return 0;
}

/* `normed` [tokens, hidden] enters the first block; residual and s->normed are what leaves the last. Returns 0, or -1 without
 * memory: caches and residual then hold a part of the step. */
EXPORT int headway_decoder_blocks(const struct block *blocks, int64_t count, const struct step *s, const void *normed) {
    for (int64_t i = 0; i < count; i++)
        if (run_block(blocks + i, s, i ? s->normed : normed)) return -1;
    return 0;
}
