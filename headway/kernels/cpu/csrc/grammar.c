/* grammar_mask, grammar_advance: automata over the bytes of tokens. Every number that comes from a tensor is checked before it
 * indexes one. */
#include "common.h"

#define CLASS_INTS 256
#define MIN_TOKENS_TO_SHARE 4096
#define HEADER_RING 5
#define BF_MINUS_INFINITY 0xff80

enum { FINISH_NONE, FINISH_EOS, FINISH_STOP_TOKEN, FINISH_LENGTH, FINISH_NO_TOKEN };

INLINE int within(int64_t i, int64_t size) { return i >= 0 && i < size; }

struct automaton {
    const int32_t *table, *vocabulary;
    int64_t states, classes, ints, vocab, words;
};

/* The state after the bytes of `token`; 0 is dead. */
INLINE int64_t walk(const struct automaton *a, int64_t state, int64_t token) {
    int64_t length = a->vocabulary[a->words * a->vocab + token];
    if (length <= 0 || !within(state, a->states)) return 0;
    if (length > 4 * a->words) length = 4 * a->words;
    const uint16_t *next = (const uint16_t *)(a->table + CLASS_INTS);
    uint32_t four = 0;
    for (int64_t i = 0; i < length && state; i++) {
        four = i % 4 ? four >> 8 : (uint32_t)a->vocabulary[i / 4 * a->vocab + token];
        const int64_t group = a->table[four & 255], at = state * a->classes + group;
        if (!within(group, a->classes) || at < 0 || CLASS_INTS + at / 2 >= a->ints) return 0;
        state = next[at] < a->states ? next[at] : 0;
    }
    return state;
}

INLINE struct automaton automaton_of(const int32_t *info, const int32_t *table, const int32_t *vocabulary, int64_t slot,
                                     int64_t ints, int64_t vocab, int64_t words) {
    return (struct automaton){table + slot * ints, vocabulary, info[3 * slot], info[3 * slot + 1], ints, vocab, words};
}

INLINE int accepts(const int32_t *info, int64_t slot, int64_t state) {
    return state > 0 && state < info[3 * slot] && state >= info[3 * slot + 2];
}

struct mask {
    void *logits;
    const int32_t *slots, *on, *info, *states, *tables, *vocabulary, *stop_counts, *stop_ids;
    int64_t stride, vocab, num_slots, ints, words, width;
    int bf;
};

INLINE int is_eos(const struct mask *a, int64_t slot, int64_t token) {
    const int64_t count = a->stop_counts[2 * slot];
    for (int64_t i = 0; i < count && i < a->width; i++)
        if (a->stop_ids[slot * a->width + i] == token) return 1;
    return 0;
}

static void mask_row(void *context, int64_t r) {
    const struct mask *a = context;
    const int64_t slot = a->slots[r];
    if (!within(slot, a->num_slots) || !a->on[slot]) return;
    const struct automaton m = automaton_of(a->info, a->tables, a->vocabulary, slot, a->ints, a->vocab, a->words);
    const int64_t state = a->states[slot];
    const int ends = accepts(a->info, slot, state);
    for (int64_t token = 0; token < a->vocab; token++) {
        if (is_eos(a, slot, token) ? ends : walk(&m, state, token) != 0) continue;
        if (a->bf) ((uint16_t *)a->logits)[r * a->stride + token] = BF_MINUS_INFINITY;
        else ((float *)a->logits)[r * a->stride + token] = -INFINITY;
    }
}

EXPORT void headway_grammar_mask(void *logits, const int32_t *slots, const int32_t *on, const int32_t *info,
                                 const int32_t *states, const int32_t *tables, const int32_t *vocabulary,
                                 const int32_t *stop_counts, const int32_t *stop_ids, int64_t rows, int64_t stride,
                                 int64_t vocab, int64_t num_slots, int64_t ints, int64_t words, int64_t width, int bf,
                                 int threads) {
    struct mask a = {logits, slots, on, info, states, tables, vocabulary, stop_counts, stop_ids,
                     stride, vocab, num_slots, ints, words, width, bf};
    parallel_for(rows, rows * vocab > MIN_TOKENS_TO_SHARE ? threads : 1, mask_row, &a);
}

EXPORT void headway_grammar_advance(const int32_t *packed, const int32_t *row_slots, const int32_t *token_ids,
                                    const int32_t *on, const int32_t *info, int32_t *states, const int32_t *tables,
                                    const int32_t *vocabulary, int32_t *alive, int32_t *results, int32_t *next_slots,
                                    int64_t rows, int64_t num_slots, int64_t vocab, int64_t ints, int64_t words,
                                    int64_t ring_size, int64_t ring_rows, int64_t record_ints, int64_t offset) {
    const int64_t ring = packed[HEADER_RING];
    if (!within(ring, ring_size)) return;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = row_slots[r];
        int32_t *result = results + (ring * ring_rows + r) * record_ints;
        if (!within(slot, num_slots) || !on[slot] || result[0] != offset + 1) continue;
        int broken = result[2] == FINISH_EOS && !accepts(info, slot, states[slot]);
        if (result[2] == FINISH_NONE || result[2] == FINISH_LENGTH) {
            const struct automaton m = automaton_of(info, tables, vocabulary, slot, ints, vocab, words);
            states[slot] = within(token_ids[r], vocab) ? (int32_t)walk(&m, states[slot], token_ids[r]) : 0;
            broken = states[slot] == 0;
        }
        if (broken) {
            result[2] = FINISH_NO_TOKEN;
            alive[slot] = 0;
            if (next_slots) next_slots[r] = -1;
        }
    }
}
