"""A decoder layer for steps of 3 to 256 tokens: linear layers that start early.

The one place that decides where the ops of ``mid_linear`` run; what they are worth is in that op's ``tiles``. Where that was
measured faster the sums of a product meet in its kernel, which adds them to the residual, and no norm is left between two
layers; elsewhere, and in float16, a norm of its own adds the product's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.mid_linear import linear_parts, mid_add, mid_gate_up, mid_linear
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

Step = tuple[torch.Tensor, torch.Tensor | None]
"""Input of a layer [T, C]: the residual's norm; or the residual times the norm's weight, and sums of the residual's squares."""


def starting_early(device: torch.device, dtype: torch.dtype) -> MidRows | None:
    """Where ops that start early win on this device; None: nowhere."""
    if not runs_gluon(device):
        return None
    return {torch.bfloat16: mid_rows, torch.float16: _float16_rows}.get(dtype)


def _float16_rows(kind: Kind, outputs: int, inputs: int) -> range:
    """The residual times a norm's weight may be beyond float16."""
    return range(0) if kind == "mid_add" else mid_rows(kind, outputs, inputs)


class MidTokens:
    """The layer of these parts. Made when weights are in place, which then stay where they are.

    Attributes:
        tokens: the T from the least to the largest for which one of its products is added by an op of ``mid_linear``; empty
            for layers of separate kernels.
    """

    def __init__(
        self, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP, next_norm: RMSNorm, rows: MidRows
    ) -> None:
        self.attention, self.post_norm, self.mlp, self.next_norm = attention, post_norm, mlp, next_norm
        out, down = attention.out.weight.shape, mlp.down.weight.shape
        self._qkv_rows = rows("mid_linear", *attention.qkv.weight.shape)
        self._gate_up_rows = rows("mid_gate_up", *mlp.gate_up.weight.shape)
        self._out_rows, self._down_rows = rows("linear_parts", *out), rows("linear_parts", *down)
        all_four = (rows("mid_add", *out), rows("mid_add", *down), self._qkv_rows, self._gate_up_rows)
        self._meeting_rows = range(max(found.start for found in all_four), min(found.stop for found in all_four))
        assert next_norm.eps == post_norm.eps, "both norms of a layer have the configuration's eps"
        used = [found for found in (self._meeting_rows, self._out_rows, self._down_rows) if found]
        self.tokens = range(min(found.start for found in used), max(found.stop for found in used)) if used else range(0)

    def forward(
        self, step: Step, residual: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> Step:
        """Add attention and MLP to residual [T, C] in place; returns the next layer's input, or the last norm's result.

        Caches of this layer are written.
        """
        x, squares = step
        num_tokens, attention, mlp, eps = x.shape[0], self.attention, self.mlp, self.post_norm.eps
        linear = attention.qkv
        if num_tokens in self._qkv_rows:
            qkv = cast(torch.Tensor, mid_linear(x, linear.weight, linear.bias, squares, eps))
        else:
            qkv = linear.forward(x)
        heads = attention.heads(qkv, batch, k_cache, v_cache)
        x, squares = self._add(heads, attention.out, residual, self.post_norm, num_tokens in self._out_rows)
        linear = mlp.gate_up
        if num_tokens in self._gate_up_rows:
            inner = cast(torch.Tensor, mid_gate_up(x, linear.weight, linear.bias, squares, eps))
        else:
            inner = cast(torch.Tensor, silu_mul(linear.forward(x)))
        return self._add(inner, mlp.down, residual, self.next_norm, num_tokens in self._down_rows)

    def _add(self, x: torch.Tensor, linear: Linear, residual: torch.Tensor, norm: RMSNorm, early: bool) -> Step:
        """residual += linear(x) in place; returns what the next product begins with."""
        if x.shape[0] in self._meeting_rows:
            return cast(Step, mid_add(x, linear.weight, linear.bias, residual, norm.weight))
        if not early:
            return norm.add(linear.forward(x), residual), None
        parts = linear_parts(x, linear.weight, linear.bias)
        return cast(torch.Tensor, add_parts_rms_norm(parts, residual, norm.weight, norm.eps)), None
