"""Layers with windows hold the blocks of their windows only, and nobody sees the difference: engines on the simulated device
against one that keeps every token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.core.cache import CacheLayout
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from tests.engine.harness import Answer, request, run
from tests.engine.tiny_llama import KV_BLOCK_BYTES, save_tiny_llama
from tests.sim.harness import arguments, simulated

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = {"beside-full": [SLIDING, FULL], "all": [SLIDING, SLIDING]}
WINDOW = 12


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_llama(found, layer_types=LAYERS[request.param], sliding_window=WINDOW)
    return found


def requests() -> list[AddRequest]:
    """Prompts of up to 70 tokens, some of which begin alike; greedy and random."""
    rng = random.Random(5)
    stem = [rng.randrange(97) for _ in range(60)]
    found = []
    for number in range(10):
        prompt = stem[: rng.randrange(8, 60)] + [rng.randrange(97) for _ in range(rng.randrange(1, 10))]
        options: dict[str, Any] = {"max_tokens": rng.randrange(4, 50), "ignore_eos": True, "seed": number}
        found.append(request(f"r{number}", prompt, temperature=rng.choice([0.0, 1.2]), **options))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Answer]:
    """Of an engine on the CPU, without run-ahead and prefix cache, all of whose layers keep every token."""
    of = CacheLayout.of

    def one_group(layers: Any, context: int, states: Any) -> CacheLayout:
        return of(layers, 1, states)  # for sequences of one token groups save nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.models.decoder.CacheLayout.of", one_group)
        patch.setattr("headway.scheduler.cache.window.WindowBlocks.first_needed", lambda *_: 0)
        changes = {"model": str(folder), "device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}
        core = build_engine(EngineArgs(**vars_of(arguments({})) | changes), progress=False)
        found = run(core, requests())
        core.shutdown()
    return found


def vars_of(args: EngineArgs) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__dataclass_fields__}


def cases() -> list[Any]:
    """Each depth with one of the two models, the others with the long sweeps."""
    sizes = [(0, 200), (1, 16), (2, 200), (4, 16)]
    return [
        pytest.param(name, *size, marks=() if (name == "all") == (size[0] in (1, 2)) else pytest.mark.soak)
        for name in LAYERS
        for size in sizes
    ]


@pytest.mark.parametrize(("folder", "depth", "blocks"), cases(), indirect=["folder"])
def test_answers_are_those_of_an_engine_that_keeps_every_token(
    folder: Path, expected: dict[str, Answer], depth: int, blocks: int
) -> None:
    """Prefixes are hit, and with 16 blocks each is used again as soon as it is free."""
    changes = {"model": str(folder), "run_ahead": depth, "kv_cache_memory_bytes": blocks * KV_BLOCK_BYTES}
    with simulated(11 + depth, **changes) as (core, _, _):
        for _ in range(2):  # the second time prompts are cached
            for name, answer in run(core, requests()).items():
                assert answer.token_ids == expected[name].token_ids, name
        assert core.stats().prefix_cache_hits > 0
