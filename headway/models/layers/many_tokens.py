"""A decoder layer for steps of many tokens: matrix products add to the residual themselves.

A norm that adds reads two tensors and writes two. A product that adds (beta = 1 in BLAS) reads the residual while it
computes, which at many tokens costs it nothing, and leaves the norm one tensor to read and one to write.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.kernels.silu_mul import silu_mul
from headway.models.layers.attention import Attention
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch

MANY_TOKENS = 1024
"""Products of fewer tokens do not hide the residual's bytes."""


class ManyTokens:
    """The layer of these parts. Made when weights are in place, which then stay where they are."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.input_norm, self.attention, self.post_norm, self.mlp = input_norm, attention, post_norm, mlp

    def forward(self, residual: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Add attention and MLP to residual [T, C] in place; caches of this layer are written."""
        attention, mlp = self.attention, self.mlp
        qkv = attention.qkv.forward(self.input_norm.forward(residual))
        _add(attention.heads(qkv, batch, k_cache, v_cache), attention.out, residual)
        inner = cast(torch.Tensor, silu_mul(mlp.gate_up.forward(self.post_norm.forward(residual))))
        _add(inner, mlp.down, residual)


def _add(x: torch.Tensor, linear: Linear, residual: torch.Tensor) -> None:
    """residual [T, N] += x [T, K] W^T + b, in f32 and rounded once but for the bias."""
    residual.addmm_(x, linear.weight.t())
    if linear.bias is not None:
        residual.add_(linear.bias)
