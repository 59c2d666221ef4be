"""The gated activation of Llama-like MLPs: silu(gate) * up.

silu_mul(x) -> y
    x  [T, 2 * I] activations (bf16, f16, f32), row = (gate [I], up [I]), last dimension contiguous
    y  [T, I] in x's dtype:  round(gate * sigmoid(gate)) * up, the sigmoid in f32
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.silu_mul import reference


def _silu_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)


silu_mul = Op(
    "silu_mul(Tensor x) -> Tensor",
    reference=reference.silu_mul,
    meta=_silu_mul_meta,
    triton="headway.kernels.silu_mul.triton:silu_mul",
    cpu="headway.kernels.cpu.ops:silu_mul",
)
