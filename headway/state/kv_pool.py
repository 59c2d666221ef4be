"""Storage of the paged KV cache: one pair of tensors per layer, all indexed by the same block ids."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch


class KVPool:
    """Paged keys and values.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: shape of the pool.
        dtype, device: of the cache; the dtype is the model's or float8_e4m3fn.

    Attributes:
        keys, values: per layer, [num_blocks, block_size, num_kv_heads, head_dim]. Block 0 is never written. On CUDA the heads
            of a block lie one after the other in memory (the views are strided): the tokens that a program of decode
            attention reads are then contiguous.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads_first = device.type == "cuda"
        block = (num_kv_heads, block_size) if heads_first else (block_size, num_kv_heads)
        # Zeros, not empty: masked-out cache entries are multiplied by zero, and 0 * NaN is NaN.
        storage = torch.zeros((num_layers, 2, num_blocks, *block, head_dim), dtype=dtype, device=device)
        if heads_first:
            storage = storage.transpose(3, 4)
        self.keys = [storage[i, 0] for i in range(num_layers)]
        self.values = [storage[i, 1] for i in range(num_layers)]
        self.num_blocks, self.block_size, self.num_kv_heads = num_blocks, block_size, num_kv_heads

    def of_layers(self, layers: Sequence[int]) -> KVPool:
        """The pool as these layers see it."""
        part = copy.copy(self)
        part.keys, part.values = [self.keys[i] for i in layers], [self.values[i] for i in layers]
        return part

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes one block takes over all layers, keys and values."""
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
