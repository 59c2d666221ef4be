"""``bad_words``: forbids the token that would complete a forbidden phrase.

bad_words(Tensor(a!) logits, Tensor slots, Tensor history, Tensor num_tokens, Tensor prompt_len, Tensor bw_counts,
          Tensor bw_offsets, Tensor bw_tokens) -> ()

    logits      float [N, V], in place       slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    history     int32 [S, L]                 num_tokens, prompt_len  int32 [S]
    bw_counts   int32 [S]: phrases, 0 = off
    bw_offsets  int32 [S, B + 1]: phrase w of a slot is bw_tokens[slot, offsets[w] : offsets[w + 1]]
    bw_tokens   int32 [S, M]

For a phrase of n tokens: if the last n - 1 generated tokens equal its first n - 1 (always so for n = 1), the logit
of its last token becomes -inf. Tokens of the prompt never match. Phrases that are empty or lie outside bw_tokens,
and last tokens outside [0, V), are dropped.
"""

from __future__ import annotations

from headway.kernels.bad_words.reference import bad_words as _reference
from headway.kernels.registry import Op

bad_words = Op(
    "bad_words(Tensor(a!) logits, Tensor slots, Tensor history, Tensor num_tokens, Tensor prompt_len, "
    "Tensor bw_counts, Tensor bw_offsets, Tensor bw_tokens) -> ()",
    reference=_reference,
    triton="headway.kernels.bad_words.triton:bad_words",
    cpu="headway.kernels.cpu.sampling_ops:bad_words",
)
