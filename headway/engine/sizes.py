"""How many rows, tokens and KV blocks an engine gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.core.config import MAX_RUN_AHEAD, EngineArgs
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.core.ints import cdiv
from headway.core.log import logger
from headway.device.base import Device
from headway.models.config import DecoderConfig
from headway.state.kv_pool import KVPool

CPU_KV_SHARE, CPU_KV_MOST = 0.25, 4 * 2**30
STEP_TOKENS = 8192
"""Most tokens of a step on a GPU."""
GRAPH_RESERVE_BYTES = 1 * 2**30
"""Left free on the card for graphs and for what other libraries allocate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Everything whose size was chosen. ``num_blocks`` is 0 until the memory was measured."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_logprobs: int
    max_in_flight: int = MAX_RUN_AHEAD + 2
    num_blocks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """One block of the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes over all layers."""
        return KVPool.bytes_per_block(
            num_layers=self.num_layers,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )


def choose_sizes(args: EngineArgs, config: DecoderConfig, on_gpu: bool) -> Sizes:
    """Sizes before the memory is known: what the user said, else what suits the device."""
    max_model_len = args.max_model_len or config.longest_context
    max_num_seqs = args.max_num_seqs or (256 if on_gpu else 64)
    tokens = args.max_num_batched_tokens or (STEP_TOKENS if on_gpu else 1024)
    if tokens < max_num_seqs:
        if args.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={max_num_seqs}: "
                "every running request needs one token a step; raise the one or lower the other"
            )
        tokens = max_num_seqs
    return Sizes(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        block_size=args.block_size or 16,
        max_logprobs=min(args.max_logprobs, config.vocab_size),
    )


def cpu_kv_bytes(device: Device) -> int:
    """A quarter of the memory that is free, at most 4 GiB; pages are only taken when touched."""
    free, _ = device.memory_bytes()
    return min(int(free * CPU_KV_SHARE), CPU_KV_MOST)


def cuda_kv_bytes(device: Device, utilization: float) -> int:
    """What ``gpu_memory_utilization`` of the card leaves beside the measured peak of the largest step."""
    free, total = device.memory_bytes()
    others = total - free - torch.cuda.memory_reserved(device.torch_device)
    return int(total * utilization) - device.peak_bytes() - max(others, 0) - GRAPH_RESERVE_BYTES


def fit_context(sizes: Sizes, shape: KVShape, budget: int, *, explicit: bool) -> Sizes:
    """Number of blocks within ``budget`` bytes, and the context they can hold.

    Args:
        explicit: the user asked for ``max_model_len``: then too little memory is an error, not a shorter context.

    Raises:
        OutOfMemoryError: naming the context that would fit.
    """
    most_useful = sizes.max_num_seqs * cdiv(sizes.max_model_len, sizes.block_size) + 1
    num_blocks = min(budget // shape.bytes_per_block, most_useful)
    tokens = (num_blocks - 1) * sizes.block_size
    need = (cdiv(sizes.max_model_len, sizes.block_size) + 1) * shape.bytes_per_block
    if tokens >= sizes.max_model_len:
        return replace(sizes, num_blocks=num_blocks)
    if explicit or tokens < sizes.block_size:
        raise OutOfMemoryError(
            f"max_model_len={sizes.max_model_len} needs a KV cache of {need / 2**20:.1f} MiB and there are "
            f"{max(budget, 0) / 2**20:.1f} MiB, enough for max_model_len={max(tokens, 0)}; lower max_model_len or "
            "raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    logger.warning("context cut from %d to %d tokens: that is what the KV cache holds", sizes.max_model_len, tokens)
    return replace(sizes, num_blocks=num_blocks, max_model_len=tokens)
