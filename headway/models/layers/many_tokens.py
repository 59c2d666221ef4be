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
from headway.kernels.wide_linear.tiles import FULL_TOKENS, HEAD_SIZE, Counts, Kind, wide_tokens
from headway.models.layers.attention import Attention
from headway.models.layers.linear import Linear
from headway.models.layers.mid_tokens import Step
from headway.models.layers.mlp import GatedMLP
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch

WideTokens = Callable[[Kind, int, int], Counts]
"""(op, N, K) -> the numbers of tokens it is used for."""


def going_wide(device: torch.device, dtype: torch.dtype) -> WideTokens | None:
    """Where wide products win on this device; None: nowhere."""
    if not runs_gluon(device):
        return None
    return {torch.bfloat16: wide_tokens, torch.float16: _float16_tokens}.get(dtype)


def _float16_tokens(kind: Kind, outputs: int, inputs: int) -> Counts:
    """The residual times a norm's weight may be beyond float16."""
    return () if kind == "wide_add" else wide_tokens(kind, outputs, inputs)


class ManyTokens:
    """The layer of these parts. Made when weights are in place, which then stay where they are.

    Attributes:
        tokens: the T that one of its ops is used for; none for layers of separate kernels.
    """

    def __init__(
        self, attention: Attention, post_norm: RMSNorm, mlp: GatedMLP, next_norm: RMSNorm, used: WideTokens
    ) -> None:
        self.attention, self.post_norm, self.mlp, self.next_norm = attention, post_norm, mlp, next_norm
        qkv, gate_up = attention.qkv, mlp.gate_up
        self._qkv = used("wide_qkv", *qkv.weight.shape) if _two_heads_wide(attention) else ()
        self._gate_up = () if gate_up.bias is not None else used("wide_gate_up", *gate_up.weight.shape)
        self._out = _add_counts(attention.out, used, self._gate_up)
        self._down = _add_counts(mlp.down, used, self._qkv)
        assert next_norm.eps == post_norm.eps == attention.eps, "all norms have the configuration's eps"
        self.tokens = (*self._qkv, *self._gate_up, *self._out, *self._down)

    def forward(
        self, step: Step, residual: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> Step:
        """Add attention and MLP to residual [T, C] in place; returns the next layer's input, or the last norm's result.

        Caches of this layer are written.
        """
        heads = self.attention.attend.attend(self.queries(step, batch, k_cache, v_cache), batch, k_cache, v_cache)
        x, squares = _add(heads, self.attention.out, residual, self.post_norm, self._out)
        if within(self._gate_up, x.shape[0]):
            inner = wide_gate_up(x, self.mlp.gate_up.weight, squares, self.post_norm.eps)
        else:
            inner = silu_mul(self.mlp.gate_up.forward(x))
        return _add(cast(torch.Tensor, inner), self.mlp.down, residual, self.next_norm, self._down)

    def queries(self, step: Step, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attention up to its scores: q [T, H, D]; keys and values are in the cache then."""
        (x, squares), attention = step, self.attention
        if not within(self._qkv, x.shape[0]):
            return attention.queries(attention.qkv.forward(x), batch, k_cache, v_cache)
        q = wide_qkv(
            x, attention.qkv.weight, squares, batch.positions, attention.cos_sin, _weight(attention.q_norm),
            _weight(attention.k_norm), attention.eps, batch.kv_slots, k_cache, v_cache, attention.attend.num_heads,
        )  # fmt: skip
        return cast(torch.Tensor, q)


def _add(x: torch.Tensor, linear: Linear, residual: torch.Tensor, norm: RMSNorm, counts: Counts) -> Step:
    """residual += linear(x) in place; returns what the next product begins with."""
    if not within(counts, x.shape[0]):
        return norm.add(linear.forward(x), residual), None
    return cast(Step, wide_add(x, linear.weight, residual, norm.weight))


def _add_counts(linear: Linear, used: WideTokens, behind: Counts) -> Counts:
    """Where ``wide_add`` is used: only where the product behind it, used for ``behind``, does the rest of the norm."""
    if linear.bias is not None:
        return ()
    pairs = [(a, b) for a in used("wide_add", *linear.weight.shape) for b in behind]
    shared = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
    return tuple(each for each in shared if each)


def within(counts: Counts, tokens: int) -> bool:
    """Whether ``tokens`` is one of them."""
    return any(tokens in each for each in counts)


def pays(batch: StepBatch) -> bool:
    """Whether wide products do, where they are fast: not beside decode rows, unless the step is a full one.

    Graphs call all rows prompts, so a smaller step with decode rows is surely launched kernel by kernel, and wide products cost
    the host more; one of decode rows alone has an attention that reads the projections as they are.
    """
    return batch.num_decode_rows == 0 or len(batch.input_ids) >= FULL_TOKENS


def _weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _two_heads_wide(attention: Attention) -> bool:
    """Whether ``wide_qkv`` can do it at all."""
    attend = attention.attend
    whole = attend.head_dim == attention.cos_sin.shape[1] == HEAD_SIZE
    return whole and attention.qkv.bias is None and attend.num_heads % 2 == attend.num_kv_heads % 2 == 0
