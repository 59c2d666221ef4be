/* ngram_draft: guesses from what followed the same tokens before. */
#include "common.h"

/* How many of the last `most` tokens of a text of `known` equal those that end at `place`. */
INLINE int64_t matched(const int32_t *text, int64_t known, int64_t place, int64_t most) {
    int64_t same = 0;
    const int64_t limit = least(most, place + 1);
    while (same < limit && text[place - same] == text[known - 1 - same]) same++;
    return same;
}

EXPORT void headway_ngram_draft(int32_t *drafts, const int32_t *row_slots, const int32_t *history, const int32_t *num_tokens,
                                int64_t rows, int64_t num_slots, int64_t length, int64_t number, int64_t min_n,
                                int64_t max_n) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = row_slots[r];
        if (slot < 0 || slot >= num_slots) continue;
        const int64_t known = least(num_tokens[slot], length);
        if (known <= 0) continue;
        const int32_t *text = history + slot * length;
        int64_t found = known - 2, longest = min_n - 1;
        for (int64_t place = known - 2; place >= 0 && longest < max_n; place--) { /* from the last: ties go to it */
            if (text[place] != text[known - 1]) continue;
            const int64_t same = matched(text, known, place, max_n);
            if (same > longest) longest = same, found = place;
        }
        const int64_t period = known - 1 - found;
        for (int64_t i = 0; i < number; i++) drafts[slot * number + i] = text[found + 1 + i % period];
    }
}
