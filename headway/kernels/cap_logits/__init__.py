"""``cap_logits``: what some families do to logits, in place.

cap_logits(logits, factor, cap) -> ()
    logits  [N, V] (bf16, f16, f32), last dimension contiguous; become factor * logit, and with a cap
            cap * tanh(factor * logit / cap) (Gemma 2, arXiv:2408.00118), computed in f32 and rounded once
    cap     0: off
"""

from __future__ import annotations

from headway.kernels.cap_logits import reference
from headway.kernels.registry import Op

cap_logits = Op(
    "cap_logits(Tensor(a!) logits, float factor, float cap) -> ()",
    reference=reference.cap_logits,
    triton="headway.kernels.cap_logits.triton:cap_logits",
)
