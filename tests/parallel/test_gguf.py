"""Weights in GGUF blocks over several ranks: each keeps the blocks of its rows, and answers are one rank's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.kernels.cpu import ops
from tests.engine.harness import Answer, request
from tests.models.test_quantized_weights import MIXED, gguf
from tests.parallel.test_engine import THREADS, compare, played

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C compiler here")
Q8_0 = 8


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf(tmp_path_factory.mktemp("gguf"), MIXED, other=Q8_0, tied=request.param)


def requests() -> list[AddRequest]:
    return [
        request(f"r{n}", [5 + n, 17, 3, 88, 41][: 2 + n], temperature=0.0, max_tokens=6, logprobs=2) for n in range(3)
    ]


def answers(file: Path, **options: Any) -> dict[str, Answer]:
    args = EngineArgs(
        model=str(file), skip_tokenizer_init=True, device="cpu", dtype="float32", max_model_len=32, max_num_seqs=4,
        kv_cache_memory_bytes=2**20, **options,
    )  # fmt: skip
    return played(args, requests())[0]


@pytest.mark.parametrize("parts", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_ranks_keep_the_blocks_of_their_rows(
    file: Path, parts: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """In float32 the blocks change nothing, so ranks must agree with one. A part of the columns is dequantised."""
    with caplog.at_level(logging.INFO, "headway"):
        found = answers(file, **THREADS, **parts)
    assert caplog.text.count("matrices kept in GGUF blocks") == 2, "on both ranks"
    compare(found, answers(file))
