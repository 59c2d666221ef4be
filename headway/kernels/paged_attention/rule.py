"""``ScoreRule``: which keys a query sees and what becomes of its scores, in one value for all forms of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

ALL_KEYS, SLIDING, CHUNKED = 0, 1, 2
"""Ways in which keys fall out of sight, as kernels take them."""


class ScoreRule(NamedTuple):
    """What ``paged_attention`` says of scores; the fields are its arguments.

    Attributes:
        scale: > 0, of q . k.
        window: > 0: a query sees the last ``window`` positions, itself included.
        soft_cap: > 0: logits become soft_cap * tanh(logits / soft_cap).
        chunk: > 0: a query at position p sees positions from p // chunk * chunk on. No layer has a window, too.
        sinks: float32 [H] or None.
        slopes: float32 [H] or None.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @property
    def reach(self) -> tuple[int, int]:
        """(``ALL_KEYS``, ``SLIDING`` or ``CHUNKED``, the window or chunk)."""
        assert not (self.window and self.chunk), "a layer has a window or a chunk"
        if self.window:
            return SLIDING, self.window
        return (CHUNKED, self.chunk) if self.chunk else (ALL_KEYS, 0)

    @property
    def is_plain(self) -> bool:
        """Whether all earlier keys are seen and scores are only scaled."""
        return not (self.window or self.soft_cap or self.chunk) and self.sinks is None and self.slopes is None

    def most_keys(self, bound: int, tile: int) -> int:
        """Keys that a query reads at most in tiles of ``tile``, of a row of up to ``bound``."""
        _, size = self.reach
        return min(bound, size + tile) if size else bound
