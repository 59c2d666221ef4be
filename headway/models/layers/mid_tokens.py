"""A decoder layer for steps of 3 to 256 tokens: linear layers that start early, norms of their own.

The one place that decides where the ops of ``mid_linear`` run; what they are worth is in that op's ``tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.mid_linear import linear_parts, mid_gate_up, mid_linear
from headway.kernels.mid_linear.tiles import Kind, mid_rows
from headway.kernels.rms_norm import add_parts_rms_norm
from headway.kernels.silu_mul import silu_mul
from headway.models.layers.attention import Attention
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch

MidRows = Callable[[Kind, int, int], range]
"""(op, N, K) -> the numbers of rows it is used for."""


def starting_early(device: torch.device, dtype: torch.dtype) -> MidRows | None:
    """Where ops that start early win on this device; None: nowhere."""
    return mid_rows if runs_gluon(device) and dtype in (torch.bfloat16, torch.float16) else None


class MidTokens:
    """The layer of these parts. Made when weights are in place, which then stay where they are.

    Attributes:
        tokens: the T from the least to the largest that any of its ops is for; empty for layers of separate kernels.
    """

    def __init__(
        self, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP, next_norm: RMSNorm, rows: MidRows
    ) -> None:
        self.attention, self.post_norm, self.mlp, self.next_norm = attention, post_norm, mlp, next_norm
        self._qkv_rows = rows("mid_linear", *attention.qkv.weight.shape)
        self._out_rows = rows("linear_parts", *attention.out.weight.shape)
        self._gate_up_rows = rows("mid_gate_up", *mlp.gate_up.weight.shape)
        self._down_rows = rows("linear_parts", *mlp.down.weight.shape)
        used = [found for found in (self._qkv_rows, self._out_rows, self._gate_up_rows, self._down_rows) if found]
        self.tokens = range(min(found.start for found in used), max(found.stop for found in used)) if used else range(0)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: StepBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Add attention and MLP to residual [T, C], whose ``input_norm`` is x [T, C], in place; returns the next norm of it.

        Caches of this layer are written.
        """
        num_tokens, attention, mlp = x.shape[0], self.attention, self.mlp
        linear = attention.qkv
        if num_tokens in self._qkv_rows:
            qkv = cast(torch.Tensor, mid_linear(x, linear.weight, linear.bias))
        else:
            qkv = linear.forward(x)
        heads = attention.heads(qkv, batch, k_cache, v_cache)
        x = _add(heads, attention.out, residual, self.post_norm, num_tokens in self._out_rows)
        linear = mlp.gate_up
        if num_tokens in self._gate_up_rows:
            inner = cast(torch.Tensor, mid_gate_up(x, linear.weight, linear.bias))
        else:
            inner = cast(torch.Tensor, silu_mul(linear.forward(x)))
        return _add(inner, mlp.down, residual, self.next_norm, num_tokens in self._down_rows)


def _add(x: torch.Tensor, linear: Linear, residual: torch.Tensor, norm: RMSNorm, early: bool) -> torch.Tensor:
    """residual += linear(x) in place; returns its norm."""
    if not early:
        return norm.add(linear.forward(x), residual)
    parts = linear_parts(x, linear.weight, linear.bias)
    return cast(torch.Tensor, add_parts_rms_norm(parts, residual, norm.weight, norm.eps))
