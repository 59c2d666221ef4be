"""How many rows, tokens and KV blocks an engine gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from headway.core.cache import ALL_LAYERS, CacheLayout
from headway.core.config import (
    MAX_RUN_AHEAD,
    USUAL_THRESHOLDS,
    EngineArgs,
    Thresholds,
    longest_that_fits,
    most_step_tokens,
)
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.core.ints import cdiv
from headway.core.log import logger
from headway.device.base import Device
from headway.models.interface import ModelSpec
from headway.runner.admission import max_upload_ints
from headway.state.cache_pool import StateStorage

CPU_KV_SHARE, CPU_KV_MOST = 0.25, 4 * 2**30
STEP_TOKENS = 8192
WHOLE_PROMPT = 4096
"""Tokens that a step has room for where prompts are taken whole and may be longer."""
"""Most tokens of a step on a GPU."""
CHECKPOINT_SHARE, CHECKPOINTS_PER_SLOT = 0.3, 2
"""Checkpoints of states take at most this share of the memory that states of requests leave, and are at most so many."""
GRAPH_RESERVE_BYTES = 1 * 2**30
"""Left free on the card for graphs and for what other libraries allocate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Everything whose size was chosen. ``num_blocks`` is 0 until the memory was measured; ``width`` is the most tokens of a
    decode row, drafts included; ``lookahead`` the places behind its last one that the drafter writes keys to;
    ``halves_from`` see ``RunnerConfig``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_logprobs: int
    max_in_flight: int = MAX_RUN_AHEAD + 2
    num_blocks: int = 0
    thresholds: Thresholds = USUAL_THRESHOLDS
    width: int = 1
    lookahead: int = 0
    num_checkpoints: int = 0
    halves_from: tuple[int, int] = (0, 0)

    @property
    def longest_row(self) -> int:
        """Most tokens of a slot: drafts may lie behind the last one that a request can have."""
        return self.max_model_len + self.width - 1 + self.lookahead


def choose_sizes(
    args: EngineArgs,
    spec: ModelSpec,
    on_gpu: bool,
    thresholds: Thresholds = USUAL_THRESHOLDS,
    width: int = 1,
    lookahead: int = 0,
) -> Sizes:
    """Sizes before the memory is known: what the user said, else what suits the device."""
    max_model_len = args.max_model_len or spec.longest_context
    max_num_seqs = args.max_num_seqs or (256 if on_gpu else 64)
    tokens = args.max_num_batched_tokens or (STEP_TOKENS if on_gpu else 1024)
    if spec.cache.is_empty:  # a step takes texts whole
        if args.max_num_batched_tokens is None:
            tokens = max(tokens, max_model_len)
        elif tokens < max_model_len:
            if args.max_model_len is not None:
                raise ConfigError(
                    f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len}, and this model takes texts "
                    "whole; raise the one or lower the other"
                )
            logger.warning("context cut from %d to %d tokens: the model takes texts whole", max_model_len, tokens)
            max_model_len = tokens
    tokens = _for_wholes(args, spec, tokens, max_model_len, max_num_seqs * width)
    if tokens < max_num_seqs * width:
        if args.max_num_batched_tokens:
            each = "one token" if width == 1 else f"{width} tokens, drafts included,"
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={max_num_seqs} take: "
                f"every running request needs {each} a step; raise the one or lower the other"
            )
        tokens = max_num_seqs * width
    return Sizes(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        block_size=args.block_size or 16,
        max_logprobs=min(args.max_logprobs, spec.vocab_size),
        thresholds=thresholds,
        width=width,
        lookahead=lookahead,
        halves_from=(args.dbo_decode_token_threshold, args.dbo_prefill_token_threshold) if args.enable_dbo else (0, 0),
    )


def _for_wholes(args: EngineArgs, spec: ModelSpec, tokens: int, max_model_len: int, beside: int) -> int:
    """``tokens`` of a step, or as many as tokens that see each other must have in one, ``beside`` rows that decode.

    Raises:
        ConfigError: the user allows fewer than a picture takes.
    """
    least = longest_whole(spec, max_model_len)
    if least and tokens < least + beside:
        if args.max_num_batched_tokens is None:
            return least + beside
        picture = spec.encoder.longest if spec.encoder is not None else 0
        if tokens < picture + beside:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than a picture's {picture} tokens, which see each other, beside "
                f"{beside} that decode; raise it or lower max_num_seqs"
            )
    return tokens


def longest_whole(spec: ModelSpec, max_model_len: int) -> int:
    """Most tokens that see each other, and stay in one step for it; 0: none do."""
    vision = spec.vision
    if vision is None or not vision.sees:
        return 0
    return min(max_model_len, WHOLE_PROMPT) if vision.sees == "prompt" else vision.longest


def cpu_kv_bytes(device: Device) -> int:
    """A quarter of the memory that is free, at most 4 GiB; pages are only taken when touched."""
    free, _ = device.memory_bytes()
    return min(int(free * CPU_KV_SHARE), CPU_KV_MOST)


def cuda_kv_bytes(device: Device, utilization: float) -> int:
    """What ``gpu_memory_utilization`` of the card leaves beside the measured peak of the largest step."""
    free, total = device.memory_bytes()
    others = total - free - torch.cuda.memory_reserved(device.torch_device)
    return int(total * utilization) - device.peak_bytes() - max(others, 0) - GRAPH_RESERVE_BYTES


def fit_context(sizes: Sizes, layout: CacheLayout, block_bytes: int, budget: int, *, explicit: bool) -> Sizes:
    """Number of blocks within ``budget`` bytes, and the context they can hold.

    Args:
        layout: of the model's caches.
        block_bytes: of one block, in all layers of a group.
        explicit: the user asked for ``max_model_len``: then too little memory is an error, not a shorter context.

    Raises:
        OutOfMemoryError: naming the context that would fit.
    """
    if layout.is_empty:
        return sizes
    blocks_for = partial(_blocks_for, sizes, layout)
    wanted = blocks_for(sizes.max_model_len)
    num_blocks = sizes.max_num_seqs * wanted + 1
    if block_bytes:  # blocks of a model that caches states alone are free
        num_blocks = min(budget // block_bytes, num_blocks)
    need = (wanted + 1) * block_bytes
    if num_blocks > wanted:
        return replace(sizes, num_blocks=num_blocks)
    tokens = longest_that_fits(blocks_for, num_blocks, sizes.max_model_len)
    if explicit or tokens < sizes.block_size:
        raise OutOfMemoryError(
            f"max_model_len={sizes.max_model_len} needs a KV cache of {need / 2**20:.1f} MiB and there are "
            f"{max(budget, 0) / 2**20:.1f} MiB, enough for max_model_len={max(tokens, 0)}; lower max_model_len or "
            "raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    logger.warning("context cut from %d to %d tokens: that is what the KV cache holds", sizes.max_model_len, tokens)
    return replace(sizes, num_blocks=num_blocks, max_model_len=tokens)


def with_states(
    args: EngineArgs,
    layout: CacheLayout,
    storage: StateStorage,
    sizes: Sizes,
    budget: int,
    least: Callable[[int], int] = int,
) -> tuple[Sizes, int]:
    """The sizes with the number of checkpoints of states, and the bytes of all states.

    Args:
        storage: how they are stored.
        least: the least of what all ranks give.

    Raises:
        OutOfMemoryError: those of requests leave nothing of ``budget``; names the number of slots that would fit.
    """
    if not layout.has_states:
        return sizes, 0
    slots, each = sizes.max_num_seqs, 4 * storage.words(layout)
    request = each + storage.ring_bytes(layout)
    if request * slots > budget:
        raise OutOfMemoryError(
            f"the states of max_num_seqs={slots} requests take {request * slots / 2**20:.1f} MiB and there are "
            f"{max(budget, 0) / 2**20:.1f} MiB, enough for max_num_seqs={max(budget, 0) // request}; lower max_num_seqs or "
            "raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    checkpoints = int(CHECKPOINTS_PER_SLOT * slots)
    if each:  # else all states are those of other stages
        checkpoints = min(int((budget - request * slots) * CHECKPOINT_SHARE) // each, checkpoints)
    if not args.enable_prefix_caching:
        checkpoints = 0
    checkpoints = least(checkpoints)
    if args.enable_prefix_caching and not checkpoints:
        logger.warning(
            "no prefix will be hit: there is no memory for checkpoints of states, %.1f MiB each", each / 2**20
        )
    logger.info("states: %d requests and %d checkpoints, %.2f MiB each", slots, checkpoints, each / 2**20)
    if storage.replays:
        logger.info("rings of inputs: %d places, %.2f MiB a request", storage.replays, (request - each) / 2**20)
    return replace(sizes, num_checkpoints=checkpoints), request * slots + each * checkpoints


def upload_budget(sizes: Sizes, vocab_size: int, layout: CacheLayout) -> int:
    """Room for the largest single admission, and for a step full of ordinary ones."""
    num_groups, cross = max(len(layout.groups), 1), layout.cross
    longest = max(sizes.max_model_len, 0 if cross is None else cross.tokens)
    if sizes.thresholds.upload_ints is not None:
        return sizes.thresholds.upload_ints
    blocks = num_groups * cdiv(longest, sizes.block_size)
    largest = 2 * max_upload_ints(sizes.max_model_len, blocks, vocab_size)
    ordinary = 2 * sizes.max_num_batched_tokens + 128 * sizes.max_num_seqs
    return largest + ordinary


def kv_tokens(sizes: Sizes, layout: CacheLayout) -> int:
    """Tokens that the cache holds, where groups let tokens go: of requests of the longest context."""
    if layout.is_empty:
        return 0
    usable = sizes.num_blocks - 1
    if len(layout.groups) < 2 and not any(group.window for group in layout.groups):
        return usable * sizes.block_size
    return usable * sizes.max_model_len // _blocks_for(sizes, layout, sizes.max_model_len)


def _blocks_for(sizes: Sizes, layout: CacheLayout, num_tokens: int) -> int:
    """Most blocks that a request of ``num_tokens`` holds at once."""
    ahead = most_step_tokens(sizes.max_num_batched_tokens, sizes.width) + sizes.lookahead
    row = num_tokens + sizes.width - 1 + sizes.lookahead
    return sum(group.peak_blocks(row, sizes.block_size, ahead) for group in layout.groups or ALL_LAYERS)
