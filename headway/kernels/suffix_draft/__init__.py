"""``suffix_draft``: guesses what follows a text from what mostly followed the same words, in it and in answers that are kept.

suffix_draft(Tensor(a!) drafts, Tensor row_slots, Tensor scope, Tensor history, Tensor num_tokens, Tensor store, Tensor cursor,
             int max_match, float factor, float min_prob) -> ()

    drafts      int32 [S, K], the guesses of the listed slots are written
    row_slots   int32 [R]; a slot outside [0, S) is skipped, as is one without known tokens or of scope OFF
    scope       int32 [S], OFF, OWN or SHARED: guess nothing, from the slot's own text, from that and from the store
    history     int32 [S, L]     num_tokens  int32 [S], tokens of each, known to be <= L or cut there
    store       int32 [T], cursor  int64 [2 + C], of ``suffix_keep``: answers one after the other, each with a -1 behind it
    max_match   >= 1, most tokens that are compared
    factor, min_prob   a guess is at most floor(factor * m) tokens long for a match of m; each has a chance >= min_prob

Of the n known tokens h, a place j of a text matches in the m <= max_match tokens that end there and that equal h's last m.
Places are 0 .. n - 2 of h itself, and those of the store that are written, belong to one of its newest C answers and have a
token >= 0 behind them. Either text's places (T of the store) are cut into PARTS runs of ceil(number / PARTS) each, and a run's
candidate is the place that matches in most tokens, of equals the last. Of all candidates those of the longest match, m >= 1,
vote: draft i is the token that most of them have at j + 1 + i, of equals that of the last candidate (the store's come before
the text's own, places rising). A candidate with another token there, or none (the end of an answer), votes no more. The
chance of draft i is the product of the shares of votes, of those who could still vote, up to it: an estimate of the
probability as in SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), over a bounded sample of the occurrences. Behind the
end of h its text goes on with what was taken from it, as in ``ngram_draft``. All drafts that are not guessed are the last
token.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.suffix_draft.reference import OFF, OWN, PARTS, SHARED
from headway.kernels.suffix_draft.reference import suffix_draft as _reference

__all__ = ["OFF", "OWN", "PARTS", "SHARED", "suffix_draft"]

suffix_draft = Op(
    "suffix_draft(Tensor(a!) drafts, Tensor row_slots, Tensor scope, Tensor history, Tensor num_tokens, Tensor store, "
    "Tensor cursor, int max_match, float factor, float min_prob) -> ()",
    reference=_reference,
    triton="headway.kernels.suffix_draft.triton:suffix_draft",
    cpu="headway.kernels.cpu.draft_ops:suffix_draft",
)
