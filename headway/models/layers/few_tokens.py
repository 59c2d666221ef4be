"""A decoder layer for steps of few tokens: norms, activation and residual additions inside the linear layers.

The one place that decides where the fused ops of ``skinny_linear`` run; what they are worth is in that op's ``tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from headway.kernels.silu_mul import silu_mul
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear
from headway.kernels.skinny_linear.tiles import Kind, fused_rows
from headway.models.layers.attention import Attention
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch

FusedRows = Callable[[Kind, int, int], int]
"""(op, N, K) -> the largest number of rows it is used for, 0 for never."""


def fusing(device: torch.device, dtype: torch.dtype) -> FusedRows | None:
    """Where fused ops win on this device; None: nowhere, weights may lie in another layout."""
    return fused_rows if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else None


class FewTokens:
    """The layer of these parts, run with fused ops. Made when weights are in place, which then stay where they are.

    Attributes:
        max_tokens: the largest T it is for. Above it, and when 0, the separate kernels are faster.
    """

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP, rows: FusedRows
    ) -> None:
        self.input_norm, self.attention, self.post_norm, self.mlp = input_norm, attention, post_norm, mlp
        out, down = attention.out.weight, mlp.down.weight
        self.max_tokens = min(rows("linear_add", *out.shape), rows("linear_add", *down.shape))
        self._qkv_rows = rows("norm_linear", *attention.qkv.weight.shape)
        self._gate_up_rows = rows("norm_gate_up", *mlp.gate_up.weight.shape)

    def forward(self, residual: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Add attention and MLP to residual [T, C], T <= max_tokens, in place; caches of this layer are written."""
        num_tokens, attention, mlp = residual.shape[0], self.attention, self.mlp
        norm, linear = self.input_norm, attention.qkv
        if num_tokens <= self._qkv_rows:
            qkv = cast(torch.Tensor, norm_linear(residual, norm.weight, norm.eps, linear.weight, linear.bias))
        else:
            qkv = linear.forward(norm.forward(residual))
        heads = attention.heads(qkv, batch, k_cache, v_cache)
        linear_add(heads, attention.out.weight, attention.out.bias, residual)

        norm, linear = self.post_norm, mlp.gate_up
        if num_tokens <= self._gate_up_rows:
            inner = norm_gate_up(residual, norm.weight, norm.eps, linear.weight, linear.bias)
        else:
            inner = silu_mul(linear.forward(norm.forward(residual)))
        linear_add(inner, mlp.down.weight, mlp.down.bias, residual)
