"""What a plain record does not say is off: no, none, nothing. What else is usual stands here."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec

import headway.core
from headway.core.cache import CacheKind
from headway.core.histogram import Histogram
from headway.core.task import Task

ELSEWHERE = {"EngineArgs", "SamplingParams", "PoolingParams", "SchedulerConfig", "Thresholds"}
"""Every field of theirs: tests/api/test_arguments.py."""
USUAL: dict[str, Any] = {
    "AddRequest.task": Task.GENERATE, "AddRequest.token_type_range": (0, 0), "CacheGroup.kind": CacheKind.FULL,
    "EncodeJob.end": 2**31 - 1, "EncodeJob.is_last": True, "EncoderItem.first": -1, "EncoderItem.late": -1,
    "EncoderItem.reach": (0, 0), "MediaRun.columns": 1, "ModelInfo.tasks": (Task.GENERATE,), "PoolingInfo.activation": "none",
    "PoolingInfo.include_prompt": True, "PoolingInfo.normalize": True, "PoolingInfo.num_token_types": 1,
    "PoolingInfo.pooling_type": "last", "PoolingInfo.similarity": "cosine", "PoolingInfo.truncation_side": "right",
    "SoundInfo.reduces": 1, "SpeculativeConfig.rejection_sample_method": "standard", "StepPlan.width": 1,
    "VisionInfo.channels": 3,
    "VisionInfo.frames": 1, "VisionInfo.group": 1, "VisionInfo.video_token": -1,
    **{f"{kind}RequestOutput.finished": True for kind in ("Classification", "Embedding", "Pooling", "Scoring")},
    **{f"SpeechRules.{name}": -1 for name in ("end", "first_timestamp", "max_initial")},
    **{f"HearingInfo.{name}": -1 for name in ("first_timestamp", "max_initial", "no_speech", "no_timestamps", "previous")},
}  # fmt: skip
"""By record and field."""


def records() -> Iterator[type[Any]]:
    """Of all modules of ``core``."""
    for module in pkgutil.iter_modules(headway.core.__path__):
        for name, kind in vars(importlib.import_module(f"headway.core.{module.name}")).items():
            is_record = isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))
            if is_record and kind.__module__ == f"headway.core.{module.name}" and name not in ELSEWHERE:
                yield kind


def defaults(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Fields that need not be given, and what they are then."""
    if issubclass(kind, msgspec.Struct):
        for each in msgspec.structs.fields(kind):
            if each.default is not msgspec.NODEFAULT:
                yield each.name, each.default
            elif each.default_factory is not msgspec.NODEFAULT:
                yield each.name, each.default_factory()
    else:
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING:
                yield field.name, field.default
            elif field.default_factory is not dataclasses.MISSING:
                yield field.name, field.default_factory()


def test_what_is_not_said_is_off() -> None:
    found: dict[str, Any] = {}
    count = 0
    for kind in records():
        for name, value in defaults(kind):
            count += 1
            if isinstance(value, Histogram):
                is_on = bool(value.counts or value.total)
            else:
                is_on = len(value) > 0 if hasattr(value, "__len__") else bool(value)
            if is_on:
                found[f"{kind.__name__}.{name}"] = value
    assert count > 150 and found == USUAL
