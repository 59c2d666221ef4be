"""``CrossAttention``: a decoder's tokens attend to the outputs of the encoder, whose keys and values lie in the paged cache.

Shapes: T tokens of the step, H query heads, KH key/value heads, D head size, N encoder outputs.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.kernels.cross_attention import cross_attention
from headway.kernels.cross_kv_write import cross_kv_write
from headway.state.batch import CrossBatch
from headway.state.cache_pool import LayerCache


class CrossAttention:
    """Of one layer. Holds numbers only; tensors come with each call.

    Args:
        num_heads, num_kv_heads, head_dim: H, KH, D; H is a multiple of KH.
        scale: factor on the scores, usually D ** -0.5.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        assert num_heads % num_kv_heads == 0
        self.num_heads, self.num_kv_heads, self.head_dim, self.scale = num_heads, num_kv_heads, head_dim, scale

    def write(self, kv: torch.Tensor, places: torch.Tensor, cache: LayerCache) -> None:
        """Once for each item: kv [N, 2 * KH * D], keys and values of its outputs, go to ``places``, int32 [N]."""
        cross_kv_write(kv, places, *cache)

    def attend(self, q: torch.Tensor, cross: CrossBatch, cache: LayerCache) -> torch.Tensor:
        """[T, H * D] -> [T, H * D]; zeros where a token reads nothing."""
        heads = q.unflatten(1, (self.num_heads, self.head_dim))
        tables = (cross.block_tables, cross.slots, cross.starts, cross.lens, cross.arrivals)
        out = cross_attention(heads, *cache, *tables, self.scale, cross.max_len_bound)
        return cast(torch.Tensor, out).flatten(1)
