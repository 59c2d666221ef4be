"""``ngram_draft``: guesses what follows a text from what followed the same words in it before.

ngram_draft(Tensor(a!) drafts, Tensor row_slots, Tensor history, Tensor num_tokens, int min_n, int max_n) -> ()

    drafts      int32 [S, K], the guesses of the listed slots are written
    row_slots   int32 [R]; a slot outside [0, S) is skipped
    history     int32 [S, L]     num_tokens  int32 [S], tokens of each, known to be <= L or cut there
    min_n, max_n  1 <= min_n <= max_n: tokens that must, and at most need, be equal

Of a text h of n tokens, an earlier place j < n - 1 matches in the m <= max_n tokens that end there when
h[j - m + 1 .. j] = h[n - m .. n - 1]. Of the places that match in min_n tokens or more the one that matches in most is taken,
among equals the last. Draft i is h[j + 1 + i mod (n - 1 - j)]: what followed, and, where the text ends before the drafts do,
the same again. Without a match all drafts are the last token (as if j = n - 2). A text of no tokens leaves its drafts.
"""

from __future__ import annotations

from headway.kernels.ngram_draft.reference import ngram_draft as _reference
from headway.kernels.registry import Op

ngram_draft = Op(
    "ngram_draft(Tensor(a!) drafts, Tensor row_slots, Tensor history, Tensor num_tokens, int min_n, int max_n) -> ()",
    reference=_reference,
    triton="headway.kernels.ngram_draft.triton:ngram_draft",
    cpu="headway.kernels.cpu.draft_ops:ngram_draft",
)
