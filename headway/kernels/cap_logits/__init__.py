"""``cap_logits``: what some families do to logits, in place.

cap_logits(logits, factor, cap) -> ()
    logits  [N, V] (bf16, f16, f32), last dimension contiguous; become factor * logit, and with a cap
            cap * tanh(factor * logit / cap) (Gemma 2, arXiv:2408.00118), computed in f32 and rounded once
    cap     0: off
"""

from __future__ import annotations

import torch

from headway.kernels.cap_logits import reference
from headway.kernels.registry import Op


def _cap_logits_meta(logits: torch.Tensor, factor: float, cap: float) -> None:
    return None


cap_logits = Op(
    "cap_logits(Tensor(a!) logits, float factor, float cap) -> ()",
    reference=reference.cap_logits,
    meta=_cap_logits_meta,
    triton="headway.kernels.cap_logits.triton:cap_logits",
)
