"""``allowed_tokens``: forbids every token outside a request's allowed set.

allowed_tokens(Tensor(a!) logits, Tensor slots, Tensor allowed_on, Tensor allowed_bits) -> ()

    logits        float [N, V], in place     slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    allowed_on    int32 [S], 0 = off
    allowed_bits  int32 [S, ceil(V / 32)] ([S] when that is 1): bit t % 32 of word t // 32 set = token t allowed

The logits of all other tokens become -inf.
"""

from __future__ import annotations

from headway.kernels.allowed_tokens.reference import allowed_tokens as _reference
from headway.kernels.registry import Op

allowed_tokens = Op(
    "allowed_tokens(Tensor(a!) logits, Tensor slots, Tensor allowed_on, Tensor allowed_bits) -> ()",
    reference=_reference,
    triton="headway.kernels.allowed_tokens.triton:allowed_tokens",
    cpu="headway.kernels.cpu.sampling_ops:allowed_tokens",
)
