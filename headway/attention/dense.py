"""``DenseAttention``: rotary embedding and attention both ways of one layer, within each row of the step; nothing is cached.

Shapes: T tokens of the step, H query heads, KH key/value heads, D head size, L positions.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_rope import dense_rope
from headway.state.batch import StepBatch


class DenseAttention:
    """Bidirectional grouped-query attention of one layer over whole texts. Holds numbers only; tensors come with each call.

    Args:
        num_heads, num_kv_heads: H, KH; H is a multiple of KH.
        scale: factor on the scores, usually D ** -0.5.
        reach: a query sees keys at most so many tokens away on either side; -1: all of its text.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
    """

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, scale: float, reach: int = -1, soft_cap: float = 0.0
    ) -> None:
        assert num_heads % num_kv_heads == 0
        assert reach >= -1
        assert soft_cap >= 0.0
        self.num_heads, self.num_kv_heads, self.scale = num_heads, num_kv_heads, scale
        self.reach, self.soft_cap = reach, soft_cap

    def rotate(
        self,
        qkv: torch.Tensor,
        batch: StepBatch,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Normalise (where there are norms) and rotate queries and keys in place; see ``dense_rope``."""
        dense_rope(qkv, batch.positions, cos_sin, q_norm, k_norm, eps, self.num_heads, self.num_kv_heads)

    def __call__(self, qkv: torch.Tensor, batch: StepBatch, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            qkv: [T, (H + 2 KH) * D], rotated.
            bias: f32 [H, 2 L - 1] by distance, see ``dense_attention``; or None.

        Returns:
            [T, H * D] in qkv's dtype; anything on padding.
        """
        numbers = (self.num_heads, self.num_kv_heads, self.scale, self.reach, self.soft_cap, batch.max_query_len)
        return cast(torch.Tensor, dense_attention(qkv, batch.query_start, bias, *numbers))
