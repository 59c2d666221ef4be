"""Headway: an inference engine in which the host never waits for the device inside a step.

Names load on first use, so that ``import headway`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

# On a CPU, torch's OpenMP threads spin for milliseconds behind each of its operations, on the cores that our own threads need.
# OpenMP reads this when torch is imported, so later is too late; what the user has set stays.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM
    from headway.api.llm import LLM
    from headway.core.errors import (
        ConfigError,
        EngineDeadError,
        HeadwayError,
        InvalidRequestError,
        ModelError,
        OutOfMemoryError,
        RequestFailedError,
        UnknownParameterError,
        UnsupportedModelError,
        WeightsError,
    )
    from headway.core.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from headway.core.params import PoolingParams, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "HeadwayError",
    "InvalidRequestError",
    "Logprob",
    "ModelError",
    "OutOfMemoryError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "UnknownParameterError",
    "UnsupportedModelError",
    "WeightsError",
    "__version__",
]

_HOMES = {
    "headway.api.llm": ("LLM",),
    "headway.api.async_llm": ("AsyncLLM",),
    "headway.core.outputs": (
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringRequestOutput",
    ),
    "headway.core.params": ("PoolingParams", "SamplingParams", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "headway.core.errors")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
