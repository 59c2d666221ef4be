"""Storage of the paged KV cache: one pair of tensors per layer, all indexed by the same block ids."""

from __future__ import annotations

import torch


class KVPool:
    """Paged keys and values.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: shape of the pool.
        dtype, device: of the cache.

    Attributes:
        keys, values: per layer, [num_blocks, block_size, num_kv_heads, head_dim]. Block 0 is never written.
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
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: masked-out cache entries are multiplied by zero, and 0 * NaN is NaN.
        storage = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = [storage[i, 0] for i in range(num_layers)]
        self.values = [storage[i, 1] for i in range(num_layers)]
        self.num_blocks, self.block_size = num_blocks, block_size

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes one block takes over all layers, keys and values."""
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
