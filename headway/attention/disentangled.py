"""``DisentangledAttention``: attention both ways whose scores also compare contents with distances (DeBERTa, He et al. 2021).

Shapes: T tokens of the step, H heads, D head size, B kinds of distances, L positions.
"""

from __future__ import annotations

import math
from typing import cast

import torch

from headway.kernels.disentangled_attention import disentangled_attention
from headway.state.batch import StepBatch


class DisentangledAttention:
    """Of one layer, within each row of the step. Holds numbers only; tensors come with each call.

    Args:
        num_heads: H.
        scale: factor on the sum of all products.
    """

    def __init__(self, *, num_heads: int, scale: float) -> None:
        self.num_heads, self.scale = num_heads, scale

    def __call__(
        self,
        qkv: torch.Tensor,
        batch: StepBatch,
        pos_keys: torch.Tensor | None,
        pos_queries: torch.Tensor | None,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """qkv [T, 3 * H * D] -> [T, H * D]; the tables see ``disentangled_attention``."""
        numbers = (self.num_heads, self.scale, batch.max_query_len)
        out = disentangled_attention(qkv, batch.query_start, pos_keys, pos_queries, places, *numbers)
        return cast(torch.Tensor, out)


def distance_kinds(longest: int, num_buckets: int, most: int) -> torch.Tensor:
    """int32 [2 longest - 1], the kind of each distance query - key from 1 - longest on: B / 2 for none.

    Args:
        num_buckets: half of the kinds; distances up to half of it have one each, others are logarithmic. 0: each distance up to
            ``most`` has one.
        most: the distance from which on all are the same.
    """
    apart = torch.arange(2 * longest - 1) - (longest - 1)
    span = num_buckets or most
    if num_buckets:
        middle = num_buckets // 2
        away = torch.where(apart.abs() < middle, middle - 1, apart.abs())
        log = torch.log(away / middle) / torch.log(torch.tensor((most - 1) / middle)) * (middle - 1)
        far = (torch.ceil(log) + middle) * apart.sign()
        apart = torch.where(away <= middle, apart, far.to(torch.int64))
    return (apart + span).clamp(0, 2 * span - 1).int()


def disentangled_scale(head_dim: int, kinds: int) -> float:
    """1 / sqrt(D * number of products that are summed)."""
    return 1.0 / math.sqrt(head_dim * kinds)
