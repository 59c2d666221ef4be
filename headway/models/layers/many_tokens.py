"""A decoder layer for steps of many tokens: what follows the wide products is done in their epilogue.

The one place that decides where the ops of ``wide_linear`` run; what they are worth is in that op's ``tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.silu_mul import silu_mul
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.tiles import HEAD_SIZE, Kind, least_tokens
from headway.models.layers.attention import Attention
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch

LeastTokens = Callable[[Kind, int, int], int | None]
"""(op, N, K) -> the number of tokens from which on it is used; None: never."""


def going_wide(device: torch.device, dtype: torch.dtype) -> LeastTokens | None:
    """Where wide products win on this device; None: nowhere."""
    return least_tokens if runs_gluon(device) and dtype in (torch.bfloat16, torch.float16) else None


class ManyTokens:
    """The layer of these parts. Made when weights are in place, which then stay where they are.

    Attributes:
        least_tokens: the T from which on one of its ops is used; None for layers of separate kernels.
    """

    def __init__(
        self, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP, next_norm: RMSNorm, least: LeastTokens
    ) -> None:
        self.attention, self.post_norm, self.mlp, self.next_norm = attention, post_norm, mlp, next_norm
        qkv, gate_up = attention.qkv, mlp.gate_up
        self._qkv_from = least("wide_qkv", *qkv.weight.shape) if _two_heads_wide(attention) else None
        self._gate_up_from = None if gate_up.bias is not None else least("wide_gate_up", *gate_up.weight.shape)
        self._out_from = _add_from(attention.out, least)
        self._down_from = _add_from(mlp.down, least)
        each = (self._qkv_from, self._out_from, self._gate_up_from, self._down_from)
        used = [found for found in each if found is not None]
        self.least_tokens = min(used) if used else None

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
        attend = self.attention.attend.attend
        heads = attend(self.queries(x, batch, k_cache, v_cache), batch, k_cache, v_cache)
        x = _add(heads, self.attention.out, residual, self.post_norm, self._out_from)
        if self._gate_up_from is not None and x.shape[0] >= self._gate_up_from:
            inner = wide_gate_up(x, self.mlp.gate_up.weight)
        else:
            inner = silu_mul(self.mlp.gate_up.forward(x))
        return _add(cast(torch.Tensor, inner), self.mlp.down, residual, self.next_norm, self._down_from)

    def queries(self, x: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attention up to its scores: [T, C] -> q [T, H, D]; keys and values are in the cache then."""
        attention = self.attention
        if self._qkv_from is None or x.shape[0] < self._qkv_from:
            return attention.queries(attention.qkv.forward(x), batch, k_cache, v_cache)
        q = wide_qkv(
            x, attention.qkv.weight, batch.positions, attention.cos_sin, _weight(attention.q_norm),
            _weight(attention.k_norm), attention.eps, batch.kv_slots, k_cache, v_cache, attention.attend.num_heads,
        )  # fmt: skip
        return cast(torch.Tensor, q)


def _add(x: torch.Tensor, linear: Linear, residual: torch.Tensor, norm: RMSNorm, least: int | None) -> torch.Tensor:
    """residual += linear(x) in place; returns its norm."""
    if least is None or x.shape[0] < least:
        return norm.add(linear.forward(x), residual)
    wide_add(x, linear.weight, residual)
    return norm.forward(residual)


def _add_from(linear: Linear, least: LeastTokens) -> int | None:
    return None if linear.bias is not None else least("wide_add", *linear.weight.shape)


def _weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _two_heads_wide(attention: Attention) -> bool:
    """Whether ``wide_qkv`` can do it at all."""
    attend = attention.attend
    whole = attend.head_dim == attention.cos_sin.shape[1] == HEAD_SIZE
    return whole and attention.qkv.bias is None and attend.num_heads % 2 == attend.num_kv_heads % 2 == 0
