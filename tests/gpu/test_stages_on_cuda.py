"""Stages on two cards for every kind of model: what each gives is one card's, with graphs, in float32 at depth 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, run
from tests.engine.tiny_encoder_decoders import arguments as reading
from tests.engine.tiny_encoders import run as pooled
from tests.gpu.test_mixtures_on_cuda import make
from tests.gpu.test_ranks_on_cuda import tokens
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_sight import arguments as seeing
from tests.parallel import test_stages_that_pool, test_stages_that_read, test_stages_that_see
from tests.parallel.test_engine import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]
TWO: dict[str, Any] = {"pipeline_parallel_size": 2}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


def answers(args: EngineArgs, requests: Callable[[EngineCore], list[AddRequest]]) -> dict[str, Answer]:
    core = build_engine(args, progress=False)
    try:
        return run(core, requests(core))
    finally:
        core.shutdown()


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", ["kimi-linear", "zamba2", "minimax"])
def test_states(name: str, drafts: bool, tmp_path: Path) -> None:
    make(name, tmp_path)
    more = {"speculative_config": dict(NGRAM)} if drafts else {}
    wanted, found = tokens(tmp_path, **more), tokens(tmp_path, **more, **TWO)
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= len(wanted) - 1


@pytest.mark.parametrize("name", ["longcat", "mixtral"])
def test_latents_and_drafts(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    more = {"speculative_config": dict(NGRAM)} if name == "mixtral" else {}
    wanted, found = tokens(tmp_path, **more), tokens(tmp_path, **more, **TWO)
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= len(wanted) - 1


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5"])
def test_what_is_seen(name: str) -> None:
    sizes: dict[str, Any] = {
        "device": "cuda", "run_ahead": 2, "max_num_seqs": 3, "max_num_batched_tokens": 28, "kv_cache_memory_bytes": 2**21,
    }  # fmt: skip
    folder = test_stages_that_see.folder_of(name)

    def found(**more: Any) -> dict[str, Answer]:
        args = seeing(folder, **sizes | more)
        return answers(args, lambda core: test_stages_that_see.traffic(name, info_of(core)))

    compare(found(**TWO), found())


@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_what_is_heard_and_read(kind: str) -> None:
    sizes: dict[str, Any] = {"device": "cuda", "run_ahead": 2, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    folder = test_stages_that_read.folder_of(kind)

    def found(**more: Any) -> dict[str, Answer]:
        args = reading(folder, **sizes | more)
        return answers(args, lambda core: test_stages_that_read.requests(kind))

    compare(found(**TWO), found())


@pytest.mark.parametrize("kind", ["mean", "labels"])
def test_what_is_pooled(kind: str) -> None:
    sizes: dict[str, Any] = {
        "model": test_stages_that_pool.folder_of(kind), "runner": "pooling", "dtype": "float32", "device": "cuda",
        "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 16, "run_ahead": 2,
        **test_stages_that_pool.KINDS[kind][1],
    }  # fmt: skip
    found = []
    for more in (TWO, {}):
        core = build_engine(EngineArgs(**sizes | more), progress=False)
        found.append(pooled(core, test_stages_that_pool.requests(kind)))
        core.shutdown()
    assert found[0].keys() == found[1].keys()
    for name, vector in found[0].items():
        torch.testing.assert_close(torch.tensor(vector), torch.tensor(found[1][name]), atol=1e-4, rtol=1e-4)
