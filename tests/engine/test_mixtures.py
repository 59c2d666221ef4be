"""Mixtures through the whole engine: greedy tokens of transformers on the CPU, and the same tokens on the simulated device at
every depth of run-ahead, in chunks, beside others, behind hits and preemptions."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import request, run
from tests.models.tiny import TINY, hf_model, save
from tests.sim.harness import simulated

VOCAB = 97
ALL = (
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "olmoe",
    "granite-moe",
    "glm4-moe",
    "gpt-oss",
    "llama4",
    "gemma4-moe",
    "phimoe",
)
CPU: dict[str, Any] = {"device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}


@functools.cache
def folder_of(name: str) -> Path:
    return save(hf_model(TINY[name]), Path(tempfile.mkdtemp(prefix=f"headway-{name}-")))


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": 8, "kv_cache_memory_bytes": 2**22,
    }  # fmt: skip
    return sizes | changes


def engine(name: str, **changes: Any) -> EngineCore:
    return build_engine(EngineArgs(**arguments(name, **CPU | changes)), progress=False)


@functools.cache
def prompts() -> list[list[int]]:
    """Some begin alike, so that prefixes hit."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB) for _ in range(24)]
    own = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 17]))] for _ in range(8)]
    return [common + each if number % 2 else each for number, each in enumerate(own)]


def requests(max_tokens: int = 8) -> list[AddRequest]:
    found = []
    for number, prompt in enumerate(prompts()):
        sampled = {"temperature": 1.1} if number % 3 == 2 else {"temperature": 0.0}
        ends: dict[str, Any] = {"max_tokens": max_tokens + number, "ignore_eos": number % 2 == 0}
        found.append(request(f"r{number}", prompt, seed=number, **sampled, **ends))
    return found


@functools.cache
def truth(name: str) -> dict[str, list[int]]:
    core = engine(name)
    found = {key: answer.token_ids for key, answer in run(core, requests()).items()}
    core.shutdown()
    return found


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Two prompts at once, in chunks of up to 11 tokens."""
    oracle = hf_model(TINY[name])
    core = engine(name, max_num_batched_tokens=11)
    asked = [
        request(str(n), prompt, temperature=0.0, ignore_eos=True, max_tokens=6)
        for n, prompt in enumerate(prompts()[:2])
    ]
    answers = run(core, asked)
    core.shutdown()
    for number, prompt in enumerate(prompts()[:2]):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert answers[str(number)].token_ids == tokens[len(prompt) :]


def check_on_simulated_device(name: str, depth: int, **more: Any) -> EngineStats:
    """Prefixes hit."""
    changes = arguments(name, run_ahead=depth, enforce_eager=depth == 2, max_num_batched_tokens=(64, 23)[depth % 2])
    changes["enable_prefix_caching"] = True
    with simulated(7 + depth, **changes | more) as (core, _, _):
        for key, answer in run(core, requests()).items():
            assert answer.token_ids == truth(name)[key], key
        stats = core.stats()
        assert stats.prefix_cache_hits > 0
    return stats


@pytest.mark.parametrize(("depth", "name"), [(2, "glm4-moe"), *((depth, "qwen3-moe") for depth in (0, 1, 4))])
def test_simulated_device_gives_the_same_tokens(depth: int, name: str) -> None:
    check_on_simulated_device(name, depth)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("name", ALL)
def test_every_model_at_every_depth(name: str, depth: int) -> None:
    check_on_simulated_device(name, depth)


@pytest.mark.soak  # those of Qwen3-MoE always draft in tests/sim/test_kinds.py
@pytest.mark.parametrize("name", ALL)
def test_drafts_change_nothing(name: str) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    assert check_on_simulated_device(name, 2, speculative_config=lookup).num_accepted_tokens > 0


def test_preempted_requests_go_on_as_they_were() -> None:
    """Blocks for some of four requests."""
    name, block = "qwen3-moe", 2 * 2 * 2 * 20 * 4 * 8  # layers, keys and values, heads, their size, bytes, tokens
    with simulated(5, **arguments(name, run_ahead=2, kv_cache_memory_bytes=11 * block)) as (core, _, _):
        for key, answer in run(core, requests()).items():
            assert answer.token_ids == truth(name)[key], key
        assert core.stats().num_preemptions > 0
