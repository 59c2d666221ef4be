/* suffix_draft, suffix_keep: guesses from what mostly followed the same tokens, in a text and in answers that are kept. */
#include "common.h"

enum { PARTS = 32, OFF = 0, SHARED = 2, BLOCK = 16 };

/* A text with a ring's ends joined (wraps), or an ordinary one. */
typedef struct {
    const int32_t *tokens;
    int64_t size, written, oldest;
    int wraps;
} text_t;

typedef struct {
    int64_t matched, place;
    const text_t *text;
} candidate_t;

INLINE int32_t token_at(const text_t *text, int64_t place) {
    if (text->wraps) place = place < 0 ? place + text->size : place >= text->size ? place - text->size : place;
    return place < 0 ? -3 : text->tokens[place];
}

/* Whether a place of a ring holds a token of an answer that is still kept. */
INLINE int is_live(const text_t *text, int64_t place) {
    if (!text->wraps) return 1;
    int64_t back = (text->written - 1 - place) % text->size;
    if (back < 0) back += text->size;
    const int64_t when = text->written - 1 - back;
    return when >= 0 && when >= text->oldest;
}

INLINE candidate_t best_of(const text_t *text, const int32_t *mine, int64_t first, int64_t end, int64_t most) {
    candidate_t best = {0, 0, text};
    const int32_t last = mine[0], *tokens = text->tokens;
    for (int64_t block = first; block < end; block += BLOCK) {
        const int64_t stop = least(block + BLOCK, end);
        int any = 0;
        for (int64_t place = block; place < stop; place++) any |= tokens[place] == last;
        if (!any) continue;
        for (int64_t place = block; place < stop; place++) {
            if (tokens[place] != last || !is_live(text, place) || token_at(text, place + 1) < 0) continue;
            int64_t same = 1;
            while (same < most && (!text->wraps || same < text->size) && token_at(text, place - same) == mine[-same]) same++;
            if (same >= best.matched) best.matched = same, best.place = place;
        }
    }
    return best;
}

EXPORT void headway_suffix_draft(int32_t *drafts, const int32_t *row_slots, const int32_t *scope, const int32_t *history,
                                 const int32_t *num_tokens, const int32_t *store, const int64_t *cursor, int64_t rows,
                                 int64_t num_slots, int64_t length, int64_t number, int64_t size, int64_t kept,
                                 int64_t max_match, double factor, double min_prob) {
    const int64_t count = cursor[1];
    const text_t shared = {store, size, cursor[0], cursor[2 + (count > kept ? count - kept : 0) % kept], 1};
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = row_slots[r];
        if (slot < 0 || slot >= num_slots || scope[slot] == OFF) continue;
        const int64_t known = least(num_tokens[slot], length);
        if (known <= 0) continue;
        const int32_t *mine = history + slot * length + known - 1;
        const text_t own = {history + slot * length, length, 0, 0, 0};
        const text_t *texts[2] = {&shared, &own};
        const int64_t places[2] = {scope[slot] == SHARED ? size : 0, known - 1};
        candidate_t found[2 * PARTS];
        int64_t most = 0, voters = 0;
        for (int64_t c = 0; c < 2 * PARTS; c++) {
            const int64_t share = (places[c / PARTS] + PARTS - 1) / PARTS, first = (c % PARTS) * share;
            const int64_t end = least(first + share, places[c / PARTS]);
            found[c] = best_of(texts[c / PARTS], mine, first, end, least(max_match, known));
            if (found[c].matched > most) most = found[c].matched;
        }
        for (int64_t c = 0; most && c < 2 * PARTS; c++)
            if (found[c].matched == most) found[voters++] = found[c];
        const int64_t limit = (int64_t)(factor * most + 1e-6);
        double chance = 1;
        int going = voters > 0;
        for (int64_t i = 0; i < number; i++) {
            int32_t tokens[2 * PARTS], chosen = mine[0];
            int64_t top = 0, able = 0;
            for (int64_t v = 0; v < voters; v++) {
                const int64_t place = found[v].place + 1;
                if (found[v].text->wraps) tokens[v] = store[(place + i) % size];
                else tokens[v] = own.tokens[place + i % (known - place)];
            }
            for (int64_t v = 0; going && v < voters; v++) {
                int64_t votes = 0;
                for (int64_t w = 0; w < voters; w++) votes += tokens[w] == tokens[v];
                if (tokens[v] >= 0 && votes >= top) top = votes, chosen = tokens[v];
            }
            if (going) chance *= (double)top / voters;
            going = going && top > 0 && i < limit && chance >= min_prob - 1e-6;
            drafts[slot * number + i] = going ? chosen : mine[0];
            for (int64_t v = 0; v < voters; v++)
                if (tokens[v] == chosen) found[able++] = found[v];
            voters = able;
        }
    }
}

EXPORT void headway_suffix_keep(int32_t *store, int64_t *cursor, const int32_t *row_slots, const int32_t *seq_lens,
                                const int32_t *scope, const int32_t *alive, const int32_t *history, const int32_t *prompt_len,
                                const int32_t *num_tokens, int64_t rows, int64_t num_slots, int64_t length, int64_t size,
                                int64_t kept) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = row_slots[r];
        if (slot < 0 || slot >= num_slots || seq_lens[r] <= 0 || alive[slot] || scope[slot] != SHARED) continue;
        const int64_t end = least(num_tokens[slot], length), prompt = prompt_len[slot] > 0 ? prompt_len[slot] : 0;
        const int64_t number = least(end - prompt, size / 2 - 1);
        if (number <= 0) continue;
        cursor[2 + cursor[1]++ % kept] = cursor[0];
        const int32_t *answer = history + slot * length + end - number;
        for (int64_t i = 0; i <= number; i++) store[cursor[0]++ % size] = i < number ? answer[i] : -1;
    }
}
