"""The public surface is a promise: exactly these names, each of which loads; importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import headway
from tests.house.source import ROOT

PUBLIC_NAMES = [
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


def test_the_surface_is_exactly_the_promise() -> None:
    assert sorted(headway.__all__) == sorted(PUBLIC_NAMES)
    assert set(PUBLIC_NAMES) <= set(dir(headway))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_name_loads(name: str) -> None:
    assert getattr(headway, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Engine"):
        _ = headway.Engine


def imported_by(statement: str) -> set[str]:
    """The top-level modules in sys.modules after ``statement`` ran in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import headway", "from headway import SamplingParams, InvalidRequestError", "import headway.scheduler"],
)
def test_cheap_imports_stay_cheap(statement: str) -> None:
    assert not imported_by(statement) & {"torch", "triton", "transformers", "tokenizers"}


def test_the_probe_sees_torch() -> None:
    assert "torch" in imported_by("import torch")
