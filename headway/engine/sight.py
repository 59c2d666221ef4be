"""Sizes of what encoders need: rows of a step and of the encoder cache, and what the door is told of pictures."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from headway.core.errors import ConfigError
from headway.core.media import VisionInfo
from headway.engine.sizes import Sizes, longest_whole
from headway.models.interface import ModelSpec

ENCODER_CACHE_ITEMS, ENCODER_CACHE_LEAST = 3, 4096
"""Rows of the encoder cache: so many of the largest items, or at least so many."""
STEP_PATCHES = 16384
"""Patches that a step without rows that decode encodes."""
FLOPS_PER_BYTE = 120
"""What a card computes while it reads a byte: an H200 reaches 400 TFLOP/s in bfloat16 products as large as an encoder's, and
reads 3.3 TB/s. With it an encoder's work is compared with a decode step, which reads the decoder's weights."""
LEAST_TOKENS = 16
"""Of a row with pictures beside rows that decode."""


def encoder_rows(spec: ModelSpec, sizes: Sizes, step_patches: int = STEP_PATCHES) -> int:
    """Most encoder outputs of a step: as many as it has tokens, or those of one item; of pictures as many as take no longer
    than ``step_patches``."""
    if spec.encoder is None:
        return 0
    if spec.encoder.width:
        return sizes.thresholds.encoder_rows or max(step_patches // spec.encoder.patches, 1)
    return max(spec.encoder.longest, sizes.max_num_batched_tokens)


def encoder_cache_rows(spec: ModelSpec, sizes: Sizes) -> int:
    """Rows of the encoder cache: several of the largest items. 0: there is none."""
    if spec.encoder is None or not spec.encoder.width:
        return 0
    longest = max(each.longest for each in spec.encoder.both)
    return sizes.thresholds.encoder_cache_rows or max(ENCODER_CACHE_ITEMS * longest, ENCODER_CACHE_LEAST)


def staged_rows(spec: ModelSpec, sizes: Sizes) -> int:
    """Rows whose inputs a step may have to send: where a prompt is taken whole, those of all its pictures."""
    return max(encoder_rows(spec, sizes), encoder_cache_rows(spec, sizes) if sees(spec) == "prompt" else 0)


def features(spec: ModelSpec, sizes: Sizes, dtype: torch.dtype) -> tuple[int, int, torch.dtype] | None:
    """The encoder cache: rows, width, dtype; None: there is none here."""
    rows = encoder_cache_rows(spec, sizes) if spec.encodes else 0
    return None if spec.encoder is None or not rows else (rows, spec.encoder.width, dtype)


def sees(spec: ModelSpec) -> str:
    """See ``VisionInfo.sees``."""
    return "" if spec.vision is None else spec.vision.sees


def most_whole(spec: ModelSpec, sizes: Sizes) -> int:
    """Most tokens that see each other: as many as a step has beside rows that decode. 0: none do."""
    if not longest_whole(spec, sizes.max_model_len):
        return 0
    return sizes.max_num_batched_tokens - (sizes.max_num_seqs - 1) * sizes.width


def vision_info(spec: ModelSpec, sizes: Sizes) -> VisionInfo | None:
    """What the API floor is told; None: the model sees nothing, or pools."""
    if spec.vision is None or spec.pooling is not None:
        return None
    rows = encoder_cache_rows(spec, sizes)
    return msgspec.structs.replace(spec.vision, cache_rows=rows, longest_whole=most_whole(spec, sizes))


def scheduled(spec: ModelSpec, sizes: Sizes, ratio: float, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of ``SchedulerConfig`` that have to do with encoders.

    Args:
        ratio: see ``EngineArgs.encoder_step_ratio``.
        dtype: of the weights.
    """
    work = tokens = 0
    if spec.encoder is not None and spec.encoder.blocks and ratio != math.inf:
        weights = spec.layer_weights + spec.head_weights
        work = max(int(ratio * weights * dtype.itemsize * FLOPS_PER_BYTE / 2), 1)
        # A step computes so much while it reads the weights, and so much more.
        tokens = max(int((1 + ratio) * dtype.itemsize * FLOPS_PER_BYTE / 2) // LEAST_TOKENS, 1) * LEAST_TOKENS
    return {
        "encoder_blocks": () if spec.encoder is None else spec.encoder.blocks,
        "sound_blocks": () if spec.encoder is None else spec.encoder.of_kind("audio"),
        "encoder_work": work,
        "media_tokens": tokens,
        "max_encoder_rows": encoder_rows(spec, sizes),
        "encoder_cache_rows": encoder_cache_rows(spec, sizes),
        "sees": sees(spec),
        "longest_whole": most_whole(spec, sizes),
    }


def check_drafts(spec: ModelSpec, *, reads_prompts: bool) -> None:
    """Raises ConfigError: a drafter with a model of its own, which sees no pictures, beside one that does."""
    if spec.vision is not None and reads_prompts:
        raise ConfigError(
            f"{spec.architecture} sees pictures, and a draft model does not; draft by n-grams, or turn drafting off"
        )
