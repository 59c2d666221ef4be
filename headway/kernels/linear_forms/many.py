"""Times the products of many tokens, with what follows them, by ``F.linear`` and another kernel and by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from headway.kernels.linear_forms.chain import BLOCK_SIZE, EPS, Timer
from headway.kernels.linear_forms.shapes import DecoderShape
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import make_cos_sin
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.tiles import HEAD_SIZE

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""Separate kernels, one kernel."""
WEIGHTS_BYTES = 200 << 20
"""Copies of a weight take at least that much, so that none is in the L2 cache when it is used again."""


class Many:
    """Products of ``tokens`` tokens for a decoder's shape."""

    def __init__(self, shape: DecoderShape, tokens: int, device: torch.device) -> None:
        self.shape, self.tokens, self.device = shape, tokens, device

    def pairs(self) -> dict[str, Pair]:
        """Junction -> both ways."""
        found = {"gate_up": self._gate_up(), "o": self._sum("o"), "down": self._sum("down")}
        shape = self.shape
        if shape.head_dim == HEAD_SIZE and not shape.qkv_bias and shape.heads % 2 == shape.kv_heads % 2 == 0:
            found["qkv"] = self._qkv()
        return found

    def times(self, timer: Timer) -> dict[str, tuple[float, float]]:
        """Junction -> microseconds by separate kernels, and by one."""
        calls = 4 if self.tokens <= 2048 else 2
        return {
            name: (timer.spent(separate, calls), timer.spent(together, calls))
            for name, (separate, together) in self.pairs().items()
        }

    def _random(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=self.device) * scale

    def _weights(self, junction: str) -> Callable[[], torch.Tensor]:
        outputs, inputs = self.shape.weight(junction)
        count = max(2, WEIGHTS_BYTES // (2 * outputs * inputs))
        made = [self._random(outputs, inputs, scale=inputs**-0.5) for _ in range(count)]
        turn = [0]

        def take() -> torch.Tensor:
            turn[0] = (turn[0] + 1) % count
            return made[turn[0]]

        return take

    def _gate_up(self) -> Pair:
        x, weight = self._random(self.tokens, self.shape.hidden), self._weights("gate_up")
        return lambda: silu_mul(F.linear(x, weight())), lambda: wide_gate_up(x, weight())

    def _sum(self, junction: str) -> Pair:
        outputs, inputs = self.shape.weight(junction)
        x, weight = self._random(self.tokens, inputs), self._weights(junction)
        residual, norm = self._random(self.tokens, outputs), self._random(outputs)

        def together() -> torch.Tensor:
            wide_add(x, weight(), residual)
            return rms_norm(residual, norm, EPS)

        return lambda: add_rms_norm(F.linear(x, weight()), residual, norm, EPS), together

    def _qkv(self) -> Pair:
        shape, tokens = self.shape, self.tokens
        x, weight = self._random(tokens, shape.hidden), self._weights("qkv")
        norms = list(self._random(2, HEAD_SIZE)) if shape.qk_norm else [None, None]
        positions = torch.arange(tokens, dtype=torch.int32, device=self.device)
        blocks = tokens // BLOCK_SIZE + 1
        caches = self._random(2, blocks, shape.kv_heads, BLOCK_SIZE, HEAD_SIZE).transpose(2, 3)
        table = make_cos_sin(tokens, HEAD_SIZE, str(self.device))
        rest = [positions, table, *norms, EPS, positions, *caches, shape.heads]

        def separate() -> torch.Tensor:
            return rope_kv_write(F.linear(x, weight()), *rest)

        return separate, partial(_call, wide_qkv, x, weight, rest)


def _call(
    op: Callable[..., torch.Tensor], x: torch.Tensor, weight: Callable[[], torch.Tensor], rest: list[Any]
) -> torch.Tensor:
    return op(x, weight(), *rest)
