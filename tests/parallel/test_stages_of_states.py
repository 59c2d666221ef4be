"""Stages of models with states: some stages have no states, others no keys, and tokens are those of one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from headway.core.cache import CacheKind, CacheLayout, CacheSpec, Part
from headway.core.config import EngineArgs, Thresholds
from headway.core.messages import AddRequest, EngineStats
from headway.engine.boot import build_engine
from headway.engine.sizes import Sizes, with_states
from headway.state.cache_pool import StateStorage
from tests.engine.harness import Answer, request, run
from tests.parallel.families import configuration, write
from tests.parallel.test_engine import THREADS, compare

TWO: dict[str, Any] = {**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
MODELS = (
    "mamba2",
    "jamba-moe",
    "qwen3.5",
    "granite-hybrid",
    "falcon-h1",
    "lfm2",
    "olmo-hybrid",
    "kimi-linear",
    "zamba2",
)
"""The last stage of the fourth has no states, the first one no keys; the last stage of the third has no keys."""


@cache
def folder_of(name: str) -> Path:
    folder = Path(mkdtemp(prefix=f"headway-{name}-"))
    write(configuration(name)[1], folder)
    return folder


def requests(wave: int) -> list[AddRequest]:
    """Prompts of several chunks, which begin alike."""
    same = [3 + (7 * i) % 90 for i in range(40)]
    prompts = [[*same[: 24 + 4 * i], 5 + i + wave, 9] for i in range(5)]
    return [
        request(f"{wave}-{i}", prompt, seed=i, max_tokens=7 + i, ignore_eos=True, temperature=0.8 * (i % 2))
        for i, prompt in enumerate(prompts)
    ]


def answers_of(name: str, **more: Any) -> tuple[dict[str, Answer], EngineStats]:
    """Of two waves of requests, the second of which finds what the first has left."""
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "device": "cpu", "max_model_len": 80, "max_num_seqs": 4,
        "block_size": 8, "max_num_batched_tokens": 24, "run_ahead": 0, "kv_cache_memory_bytes": 2**20,
    }  # fmt: skip
    core = build_engine(EngineArgs(**sizes | more), progress=False, thresholds=Thresholds(checkpoint_every=8))
    try:
        found = run(core, requests(0)) | run(core, requests(1))
        core.check_integrity()
        return found, core.stats()
    finally:
        core.shutdown()


@cache
def one_rank(name: str) -> dict[str, Answer]:
    return answers_of(name, enable_prefix_caching=False)[0]


USUAL = {"mamba2": 1, "jamba-moe": 2, "qwen3.5": 4, "granite-hybrid": 0}


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(name, depth, marks=[] if USUAL.get(name) == depth else pytest.mark.soak)
        for name in MODELS
        for depth in (0, 1, 2, 4)
    ],
)
def test_two_stages(name: str, depth: int) -> None:
    found, stats = answers_of(name, run_ahead=depth, **TWO)
    compare(found, one_rank(name))
    assert stats.prefix_cache_hits > 0, "checkpoints of states are found on all stages"


@pytest.mark.parametrize("name", ["granite-hybrid", "qwen3.5"])
def test_ranks_that_have_little_room(name: str) -> None:
    """As many checkpoints and blocks as the stage with the least room has: others have no states, or no keys."""
    found, _ = answers_of(name, run_ahead=2, kv_cache_memory_bytes=48 * 2**10, **TWO)
    compare(found, one_rank(name))


@pytest.mark.parametrize("name", ["granite-hybrid", "qwen3.5"])
def test_drafts_that_run_states_again(name: str) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
    more: dict[str, Any] = {"speculative_config": drafts, "replayssm_buffer_len": 4}
    found, stats = answers_of(name, run_ahead=1, **more, **TWO)
    compare(found, one_rank(name))
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("name", "seed"), [("granite-hybrid", 51), *(pytest.param(each, 52, marks=pytest.mark.soak) for each in MODELS)]
)
def test_on_the_simulated_device(name: str, seed: int) -> None:
    """In graphs."""
    found, stats = answers_of(name, run_ahead=2, device=f"sim:{seed}", **TWO)
    compare(found, one_rank(name))
    assert stats.num_graph_steps


def test_all_ranks_have_room_for_as_many_checkpoints() -> None:
    """Memory differs from rank to rank; what the leader plans with is the least."""
    layout = CacheLayout.of([None], 64, [CacheSpec(CacheKind.STATE, (Part("conv", (64,)),))])
    args, storage = EngineArgs(model="nowhere"), StateStorage(4, torch.float32)
    sizes = Sizes(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, max_logprobs=0)
    own, taken = with_states(args, layout, storage, sizes, 2**20)
    fewer, less = with_states(args, layout, storage, sizes, 2**20, lambda mine: mine - 3)
    assert fewer.num_checkpoints == own.num_checkpoints - 3 > 0
    assert taken - less == 3 * 64 * 4
