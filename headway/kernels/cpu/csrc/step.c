/* apply_edits, step_unpack, slot_advance, count_tokens: the bookkeeping around a forward pass. Work proportional to what the
 * step holds, not to its padding. Every number that comes from a tensor is checked before it indexes one. */
#include "common.h"

#define MAX_EDIT 1024
#define MAX_COUNT 0x7fff
#define PROMPT_BIT 0x8000

enum { HEADER_EDITS, HEADER_EDITS_AT, HEADER_ROWS, HEADER_TOKENS, HEADER_ROWS_AT, HEADER_RING };
enum { FINISH_NONE, FINISH_EOS, FINISH_STOP_TOKEN, FINISH_LENGTH, FINISH_NO_TOKEN };

INLINE int within(int64_t i, int64_t size) { return i >= 0 && i < size; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Overflow wraps, as it does in the references. */
INLINE int32_t add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }

EXPORT void headway_apply_edits(int32_t *arena, const int32_t *packed, int64_t arena_size, int64_t packed_size,
                                int64_t max_edits) {
    const int64_t count = least(packed[HEADER_EDITS], max_edits);
    for (int64_t edit = 0; edit < count; edit++) {
        const int64_t at = packed[HEADER_EDITS_AT] + 3 * edit;
        if (at < 0 || at + 2 >= packed_size) continue;
        const int64_t dst = packed[at], src = packed[at + 1], size = packed[at + 2];
        if (dst < 0 || src < 0 || size < 0 || size > MAX_EDIT) continue;
        if (dst + size > arena_size || src + size > packed_size) continue;
        memcpy(arena + dst, packed + src, size * sizeof(int32_t));
    }
}

/* The record of row r, (slot, query_len, query_start, samples); NULL for padding. */
INLINE const int32_t *row_record(const int32_t *packed, int64_t packed_size, int64_t r) {
    const int64_t at = packed[HEADER_ROWS_AT] + 4 * r;
    return r < packed[HEADER_ROWS] && at >= 0 && at + 3 < packed_size ? packed + at : NULL;
}

struct unpack {
    const int32_t *history, *num_computed, *alive, *block_tables, *num_tokens, *drafts; /* the last two: NULL without drafts */
    int32_t *input_ids, *positions, *kv_slots;
    int64_t num_slots, length, width, block_size, total, num_drafts;
};

/* The token at `position` of a slot: known, or a draft, or 0 behind the last draft. */
INLINE int32_t token_at(const struct unpack *a, int64_t slot, int64_t position) {
    const int64_t ahead = a->drafts ? position - a->num_tokens[slot] : -1;
    if (ahead < 0) return a->history[slot * a->length + position];
    return ahead < a->num_drafts ? a->drafts[slot * a->num_drafts + ahead] : 0;
}

/* Writes the tokens of a row of `count` that starts at `start` in its slot and at `first` in the step. */
static void unpack_tokens(const struct unpack *a, int64_t slot, int64_t start, int64_t first, int64_t count) {
    const int32_t *blocks = a->block_tables + slot * a->width;
    for (int64_t token = most(first, 0); token < least(first + count, a->total); token++) {
        const int64_t position = start + token - first, column = position / a->block_size;
        const int32_t block = column < a->width ? blocks[column] : 0;
        a->input_ids[token] = token_at(a, slot, position);
        a->positions[token] = (int32_t)position;
        a->kv_slots[token] = block > 0 ? (int32_t)(block * a->block_size + position % a->block_size) : -1;
    }
}

EXPORT void headway_step_unpack(const int32_t *packed, const int32_t *history, const int32_t *num_computed,
                                const int32_t *alive, const int32_t *block_tables, int32_t *input_ids, int32_t *positions,
                                int32_t *kv_slots, int32_t *query_start, int32_t *seq_lens, int32_t *row_slots,
                                int32_t *logit_indices, const int32_t *num_tokens, const int32_t *drafts,
                                int64_t packed_size, int64_t num_slots, int64_t length, int64_t width, int64_t tokens,
                                int64_t rows, int64_t block_size, int64_t outcomes, int64_t num_drafts) {
    const int64_t total = most(least(packed[HEADER_TOKENS], tokens), 0);
    const struct unpack a = {history, num_computed, alive, block_tables, num_tokens, drafts, input_ids, positions, kv_slots,
                             num_slots, length, width, block_size, total, num_drafts};
    memset(input_ids, 0, tokens * sizeof(int32_t));
    memset(positions, 0, tokens * sizeof(int32_t));
    memset(kv_slots, 0xff, tokens * sizeof(int32_t));
    memset(logit_indices, 0, outcomes * rows * sizeof(int32_t));
    query_start[rows] = (int32_t)total;
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *record = row_record(packed, packed_size, r);
        query_start[r] = record ? record[2] : (int32_t)total;
        seq_lens[r] = 0;
        row_slots[r] = -1;
        if (!record) continue;
        const int64_t slot = record[0], count = record[1], first = record[2];
        const int64_t last = least(most(first + count - 1, 0), tokens - 1);
        for (int64_t w = 0; w < outcomes; w++)
            logit_indices[w * rows + r] = (int32_t)(drafts && record[3] > 1 ? least(most(first + w, 0), last) : last);
        if (!within(slot, num_slots)) continue;
        row_slots[r] = (int32_t)slot;
        const int64_t start = num_computed[slot];
        if (!alive[slot] || count <= 0 || start < 0 || start + count > length) continue;
        seq_lens[r] = (int32_t)(start + count);
        unpack_tokens(&a, slot, start, first, count);
    }
}

struct advance {
    int32_t *history, *num_tokens, *alive;
    uint16_t *counts;
    const int32_t *count_on, *min_total, *max_total, *stop_counts, *stop_ids;
    int64_t length, vocab, width;
};

static int finish_code(const struct advance *a, int64_t slot, int32_t token, int64_t before) {
    const int64_t stops = least(a->stop_counts[2 * slot + 1], a->width);
    if (before >= a->min_total[slot])
        for (int64_t i = 0; i < stops; i++)
            if (a->stop_ids[slot * a->width + i] == token)
                return i < a->stop_counts[2 * slot] ? FINISH_EOS : FINISH_STOP_TOKEN;
    return before + 1 >= least(a->max_total[slot], a->length) ? FINISH_LENGTH : FINISH_NONE;
}

/* Appends `token` to the slot; returns the finish code. */
static int append(const struct advance *a, int64_t slot, int32_t token) {
    const int32_t before = a->num_tokens[slot];
    const int finish = token < 0 ? FINISH_NO_TOKEN : finish_code(a, slot, token, before);
    if (within(before, a->length)) a->history[slot * a->length + before] = token < 0 ? 0 : token;
    if (a->count_on[slot] && within(token, a->vocab)) {
        uint16_t *count = a->counts + slot * a->vocab + token;
        if ((*count & MAX_COUNT) != MAX_COUNT) ++*count;
    }
    a->num_tokens[slot] = add(before, 1);
    if (finish) a->alive[slot] = 0;
    return finish;
}

/* Outcome `offset` of each row. Records are `ints` long; drafts and next_slots are NULL where rows have one outcome each. */
EXPORT void headway_slot_advance(const int32_t *packed, const int32_t *row_slots, const int32_t *token_ids,
                                 int32_t *history, int32_t *num_tokens, int32_t *num_computed, int32_t *alive,
                                 uint16_t *counts, const int32_t *count_on, const int32_t *min_total,
                                 const int32_t *max_total, const int32_t *stop_counts, const int32_t *stop_ids,
                                 int32_t *results, const int32_t *drafts, int32_t *next_slots, int64_t packed_size,
                                 int64_t rows, int64_t num_slots, int64_t length, int64_t vocab, int64_t width,
                                 int64_t ring_size, int64_t ring_rows, int64_t ints, int64_t num_drafts, int64_t offset) {
    const struct advance a = {history, num_tokens, alive, counts, count_on, min_total, max_total,
                              stop_counts, stop_ids, length, vocab, width};
    const int64_t ring = packed[HEADER_RING];
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *record = row_record(packed, packed_size, r);
        const int64_t slot = row_slots[r];
        const int live = record && within(slot, num_slots) && alive[slot];
        int32_t result[4] = {0, 0, 0, 0};
        int goes_on = 0;
        if (live) {
            num_computed[slot] = add(num_computed[slot], drafts && record[3] > 1 ? 1 : record[1]);
            if (record[3] > offset) {
                result[0] = (int32_t)offset + 1;
                result[1] = token_ids[r] < 0 ? 0 : token_ids[r];
                result[2] = append(&a, slot, token_ids[r]);
                goes_on = drafts && result[2] == FINISH_NONE && record[3] > offset + 1 && offset < num_drafts &&
                          drafts[slot * num_drafts + offset] == token_ids[r];
            }
            result[3] = num_tokens[slot];
        }
        if (next_slots) next_slots[r] = goes_on ? (int32_t)slot : -1;
        if (!within(ring, ring_size) || (offset && !live)) continue;
        int32_t *place = results + (ring * ring_rows + r) * ints;
        place[0] = result[0];
        place[offset ? 3 + offset : 1] = result[1];
        place[2] = result[2];
        place[3] = result[3];
    }
}

/* history has `length` columns, of which the first `span` may be read. A slot listed twice is merely rebuilt twice. */
EXPORT void headway_count_tokens(uint16_t *counts, const int32_t *slots, const int32_t *history, const int32_t *prompt_len,
                                 const int32_t *num_tokens, int64_t rows, int64_t num_slots, int64_t vocab,
                                 int64_t length, int64_t span) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = slots[r];
        if (!within(slot, num_slots)) continue;
        uint16_t *row = counts + slot * vocab;
        const int32_t *tokens = history + slot * length;
        const int64_t known = least(num_tokens[slot], span), prompt = least(prompt_len[slot], known);
        memset(row, 0, vocab * sizeof *row);
        for (int64_t i = 0; i < prompt; i++)
            if (within(tokens[i], vocab)) row[tokens[i]] = PROMPT_BIT;
        for (int64_t i = most(prompt, 0); i < known; i++)
            if (within(tokens[i], vocab) && (row[tokens[i]] & MAX_COUNT) != MAX_COUNT) row[tokens[i]]++;
    }
}
