"""``speech_rules``: what a transcript may go on with: suppressed tokens, and timestamps in pairs that never go back.

speech_rules(Tensor(a!) logits, Tensor slots, Tensor history, Tensor num_tokens, Tensor prompt_len, Tensor numbers,
             Tensor ids) -> ()

    logits      float [N, V], in place      slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    history     int32 [S, L], prompt then generated      num_tokens, prompt_len  int32 [S]
    numbers     int32 [S, 6]: 1 if the rules apply; number of ids never drawn; of these and those not drawn first; the first
                timestamp (-1: no rules for times); the end token; most of the first time (-1: any)
    ids         int32 [S, K]: tokens never drawn, then those not drawn first; ids outside [0, V) are dropped

With b = first timestamp, and g = the tokens generated so far, become -inf, in this order:

1. the ids (those not drawn first only while g is empty);
2. g empty: all below b, and all above b + most of the first time;
3. the last of g is a timestamp: all from b on if the one before it is, too, or there is none; else all below the end token;
4. from b to before the last timestamp of g; that one as well, unless it is g's last and the one before it is none;
5. all below b, if timestamps are together likelier than the likeliest token below b.

These are the rules of Whisper (Radford et al. 2022, A.3), as its authors' program has them.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.speech_rules.reference import speech_rules as _reference

speech_rules = Op(
    "speech_rules(Tensor(a!) logits, Tensor slots, Tensor history, Tensor num_tokens, Tensor prompt_len, Tensor numbers, "
    "Tensor ids) -> ()",
    reference=_reference,
    triton="headway.kernels.speech_rules.triton:speech_rules",
)
