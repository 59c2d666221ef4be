/* The edits of logits before the draw: logit_bias, allowed_tokens, min_tokens, penalties, bad_words.
 *
 * logits are float32 [rows, vocab] with `stride` elements between rows; a row whose slot lies outside the tables, or does
 * not use the feature, costs nothing. Products and sums round separately, as they do in torch, so that a request's
 * tokens do not depend on which implementation edited its logits. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "common.h"

#define MIN_ELEMENTS 524288 /* less than this is done before a second thread has woken up */

INLINE int within(int64_t i, int64_t size) { return i >= 0 && i < size; }

static void forbid(float *row, int64_t vocab, int64_t token) {
    if (within(token, vocab)) row[token] = -INFINITY;
}

EXPORT void headway_logit_bias(float *logits, const int32_t *slots, const int32_t *counts, const int32_t *ids,
                               const float *values, int64_t rows, int64_t stride, int64_t vocab, int64_t num_slots,
                               int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = slots[r];
        const int64_t count = within(slot, num_slots) ? least(counts[slot], width) : 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = ids[slot * width + i];
            if (within(token, vocab)) logits[r * stride + token] += values[slot * width + i];
        }
    }
}

EXPORT void headway_min_tokens(float *logits, const int32_t *slots, const int32_t *num_tokens, const int32_t *min_total,
                               const int32_t *stop_counts, const int32_t *stop_ids, int64_t rows, int64_t stride,
                               int64_t vocab, int64_t num_slots, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = slots[r];
        if (!within(slot, num_slots) || num_tokens[slot] >= min_total[slot]) continue;
        const int64_t count = least(stop_counts[2 * slot + 1], width);
        for (int64_t i = 0; i < count; i++) forbid(logits + r * stride, vocab, stop_ids[slot * width + i]);
    }
}

/* Whether all but the phrase's last token are the last generated ones; `known` tokens lie in history. */
static int ends_with(const int32_t *history, int64_t length, int64_t known, const int32_t *phrase, int64_t size) {
    for (int64_t i = 0; i < size - 1; i++) {
        const int64_t position = known - (size - 1) + i;
        if (!within(position, length) || history[position] != phrase[i]) return 0;
    }
    return 1;
}

EXPORT void headway_bad_words(float *logits, const int32_t *slots, const int32_t *history, const int32_t *num_tokens,
                              const int32_t *prompt_len, const int32_t *counts, const int32_t *offsets,
                              const int32_t *tokens, int64_t rows, int64_t stride, int64_t vocab, int64_t num_slots,
                              int64_t length, int64_t max_phrases, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = slots[r];
        const int64_t count = within(slot, num_slots) ? least(counts[slot], max_phrases) : 0;
        for (int64_t i = 0; i < count; i++) {
            const int32_t *bounds = offsets + slot * (max_phrases + 1) + i;
            const int64_t begin = bounds[0], end = bounds[1], known = num_tokens[slot];
            if (begin < 0 || end <= begin || end > width || end - begin - 1 > known - prompt_len[slot]) continue;
            const int32_t *phrase = tokens + slot * width + begin;
            if (ends_with(history + slot * length, length, known, phrase, end - begin))
                forbid(logits + r * stride, vocab, phrase[end - begin - 1]);
        }
    }
}

struct edit {
    float *logits;
    const int32_t *slots, *on, *bits;
    const int16_t *counts;
    const float *repetition, *frequency, *presence;
    int64_t stride, vocab, num_slots, width;
};

static void allow_row(void *context, int64_t r) {
    const struct edit *a = context;
    const int64_t slot = a->slots[r];
    if (!within(slot, a->num_slots) || !a->on[slot]) return;
    const int32_t *bits = a->bits + slot * a->width;
    float *row = a->logits + r * a->stride;
    const vu low = ((vu){0} + 1u) << (vu){IOTA};
    for (int64_t i = 0; i < a->vocab; i += LANES) {
        const int64_t left = a->vocab - i;
        const uint32_t word = (uint32_t)bits[i / 32] >> (i % 32);
        store_row(row, i, choose((low & word) == 0, splat(-INFINITY), load_row(row, i, left, 0)), left, 0);
    }
}

EXPORT void headway_allowed_tokens(float *logits, const int32_t *slots, const int32_t *on, const int32_t *bits,
                                   int64_t rows, int64_t stride, int64_t vocab, int64_t num_slots, int64_t width,
                                   int threads) {
    struct edit a = {.logits = logits, .slots = slots, .on = on, .bits = bits,
                     .stride = stride, .vocab = vocab, .num_slots = num_slots, .width = width};
    parallel_for(rows, rows * vocab > MIN_ELEMENTS ? threads : 1, allow_row, &a);
}

INLINE float penalise(float x, int16_t count, float repetition, float frequency, float presence) {
    const float times = (float)(count & 0x7fff);
    x = x > 0 ? x / repetition : x * repetition;
    return times > 0 ? x - frequency * times - presence : x;
}

static void penalise_row(void *context, int64_t r) {
    const struct edit *a = context;
    const int64_t slot = a->slots[r], vocab = a->vocab;
    if (!within(slot, a->num_slots) || !a->on[slot]) return;
    const int16_t *counts = a->counts + slot * vocab;
    const float repetition = a->repetition[slot], frequency = a->frequency[slot], presence = a->presence[slot];
    float *row = a->logits + r * a->stride;
    for (int64_t i = 0; i < vocab; i += 16) {
        const int64_t end = least(vocab, i + 16);
        if (end - i == 16) { /* most tokens were never seen */
            uint64_t seen[4];
            memcpy(seen, counts + i, sizeof seen);
            if (!(seen[0] | seen[1] | seen[2] | seen[3])) continue;
        }
        for (int64_t j = i; j < end; j++)
            if (counts[j]) row[j] = penalise(row[j], counts[j], repetition, frequency, presence);
    }
}

EXPORT void headway_penalties(float *logits, const int32_t *slots, const int16_t *counts, const int32_t *on,
                              const float *repetition, const float *frequency, const float *presence, int64_t rows,
                              int64_t stride, int64_t vocab, int64_t num_slots, int threads) {
    struct edit a = {.logits = logits, .slots = slots, .on = on, .counts = counts, .repetition = repetition,
                     .frequency = frequency, .presence = presence, .stride = stride, .vocab = vocab,
                     .num_slots = num_slots};
    parallel_for(rows, rows * vocab > MIN_ELEMENTS ? threads : 1, penalise_row, &a);
}
