"""Models with latent attention through the whole engine: greedy tokens of transformers on the CPU, and the same tokens on the
simulated device at every depth of run-ahead, in chunks, beside others, with prefix hits, behind preemptions."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.state.cache_pool import bytes_per_block
from tests.engine.harness import request, run
from tests.latent.tiny_latents import LATENTS, VOCAB, folder_of, hf_model, pair
from tests.sim.harness import simulated

CPU: dict[str, Any] = {"device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}
BLOCK = 8


def arguments(name: str, blocks: int = 200, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": BLOCK,
        "kv_cache_memory_bytes": blocks * bytes_per_block(pair(name).model.spec.cache, BLOCK, torch.float32),
    }  # fmt: skip
    return sizes | changes


def engine(name: str, **changes: Any) -> EngineCore:
    return build_engine(EngineArgs(**arguments(name, **CPU | changes)), progress=False)


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(50)]
    tails = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 17, 29]))] for _ in range(9)]
    return [stem[: rng.choice([0, 0, 24, 50])] + tail for tail in tails]


def requests(max_tokens: int = 22) -> list[AddRequest]:
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


@pytest.mark.parametrize("name", LATENTS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Two prompts at once, in chunks of up to 23 tokens."""
    oracle = hf_model(LATENTS[name])
    core = engine(name, max_num_batched_tokens=23)
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


def check_on_simulated_device(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch, *, eager: bool, **others: Any
) -> None:
    """Four slots for nine requests and hardly room for two: prefixes hit, requests are preempted. Rows of five tokens make keys
    and values, and contexts come in pieces of 16 tokens."""
    expected = truth(name)
    monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
    monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
    monkeypatch.setattr("headway.attention.mla.PIECE_BYTES", 0)
    changes = arguments(name, blocks=18, run_ahead=depth, enforce_eager=eager) | others
    with simulated(7 + depth, **changes) as (core, _, _):
        for key, answer in run(core, requests()).items():
            assert answer.token_ids == expected[key], key
        stats = core.stats()
        assert stats.prefix_cache_hits and stats.num_preemptions


@pytest.mark.parametrize(("name", "depth", "eager"), [
    ("v2-lite", 2, False), ("v3-yarn", 1, True), ("glm-dsa-shared", 4, False),
    pytest.param("longcat", 2, False, marks=pytest.mark.soak),
])  # fmt: skip
def test_simulated_device_gives_the_same_tokens(
    name: str, depth: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_on_simulated_device(name, depth, monkeypatch, eager=eager)


@pytest.mark.soak
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("name", LATENTS)
def test_every_model_at_every_depth(name: str, depth: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_simulated_device(name, depth, monkeypatch, eager=eager)


@pytest.mark.parametrize(("name", "depth", "number", "eager"), [
    ("v2-lite", 2, 3, False),
    pytest.param("v2-experts", 4, 2, False, marks=pytest.mark.soak), pytest.param("v3.2", 1, 2, True, marks=pytest.mark.soak),
])  # fmt: skip
def test_drafts_change_no_token(
    name: str, depth: int, number: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several tokens whose contexts the host knows a bound of; beside them prompts make keys and values."""
    expected = truth(name)
    monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
    monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
    monkeypatch.setattr("headway.attention.mla.PIECE_BYTES", 0)
    lookup = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_min": 1, "adaptive": False}
    changes = arguments(name, run_ahead=depth, enforce_eager=eager, speculative_config=lookup)
    with simulated(3 + depth, **changes) as (core, _, _):
        for key, answer in run(core, requests()).items():
            assert answer.token_ids == expected[key], key
        assert core.stats().num_accepted_tokens > 0


def test_eight_bit_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the bytes, and tokens that do not depend on how prompts are cut into steps: own tokens are read as they are
    cached."""
    found = []
    for size in (40, 13):
        core = engine("v3-yarn", kv_cache_dtype="fp8", max_num_batched_tokens=size)
        caches = core._runner.executor.body.caches.layers
        assert all(part.dtype is torch.float8_e4m3fn for layer in caches for part in layer)
        found.append({key: answer.token_ids for key, answer in run(core, requests()).items()})
        core.shutdown()
        monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
        monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
        monkeypatch.setattr("headway.attention.mla.PIECE_BYTES", 0)
    assert found[0] == found[1]
    assert found[0] != truth("v3-yarn"), "nothing was rounded"
