"""Prefixes of models with states are hit where a checkpoint of the states lies behind them, and nobody sees the difference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.core.config import Thresholds
from headway.core.messages import AddRequest
from headway.core.plan import Admission
from headway.engine.core import EngineCore
from headway.scheduler import Scheduler
from headway.state.cache_pool import StateStorage, bytes_per_block
from tests.engine.harness import request, run
from tests.recurrent.test_engine import arguments, engine
from tests.recurrent.tiny_hybrids import VOCAB, pair
from tests.sim.harness import simulated

SHARED = 67
OFTEN = Thresholds(checkpoint_every=24)


def scheduler_of(core: EngineCore) -> Scheduler:
    assert isinstance(core._scheduler, Scheduler)
    return core._scheduler


def conversation(seed: int = 5, least: int = 2) -> list[AddRequest]:
    """Prompts of which most begin alike, some of them with each other's whole prompt; greedy and random, of ``least`` tokens
    or up to nine more."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB) for _ in range(SHARED)]
    found = []
    for number in range(8):
        prompt = stem[: rng.choice([SHARED, SHARED, SHARED, 41, 64])] + [
            rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9))
        ]
        options: dict[str, Any] = {"max_tokens": rng.randrange(least, least + 10), "ignore_eos": True, "seed": number}
        found.append(request(f"r{number}", prompt, temperature=rng.choice([0.0, 1.2]), **options))
    return found


def memory(name: str, rows: int, checkpoints: int, blocks: int) -> int:
    """Bytes for exactly so many."""
    layout = pair(name).model.spec.cache
    states = StateStorage(rows + checkpoints, torch.float32, checkpoints=checkpoints).bytes(layout)
    return states + blocks * bytes_per_block(layout, 8, torch.float32)


def truth(name: str, requests: list[AddRequest]) -> dict[str, list[int]]:
    core = engine(name)
    found = {key: answer.token_ids for key, answer in run(core, requests).items()}
    core.shutdown()
    return found


@pytest.mark.parametrize(
    ("name", "depth", "rows", "checkpoints"),
    [
        *(("mamba2", 0, 4, 8), ("falcon-h1", 2, 4, 1), ("qwen3-next", 4, 2, 2), ("lfm2", 1, 4, 3)),
        *(pytest.param(name, 2, 3, 2, marks=pytest.mark.soak) for name in ("zamba2", "minimax", "kimi-linear")),
    ],
)
def test_hits_give_the_same_tokens(name: str, depth: int, rows: int, checkpoints: int, monkeypatch: Any) -> None:
    """With one checkpoint each is overwritten as soon as the next is saved."""
    monkeypatch.setattr("headway.engine.sizes.CHECKPOINTS_PER_SLOT", checkpoints / rows)
    expected = truth(name, conversation())
    changes = arguments(name, run_ahead=depth, max_num_seqs=rows, max_num_batched_tokens=48)
    with simulated(3 + depth, thresholds=OFTEN, **changes) as (core, _, _):
        for _ in range(2):
            for key, answer in run(core, conversation()).items():
                assert answer.token_ids == expected[key], key
        assert core.stats().prefix_cache_hits > 0


ONES = ("mamba", "falcon-mamba", "jamba", "nemotron-h", "granite-hybrid", "qwen3.5", "olmo-hybrid")
"""Models that hit on the CPU alone, each with another mixer or another way between them."""
WITHOUT_BLOCKS = ("mamba", "falcon-mamba")


def watched(core: EngineCore) -> list[Admission]:
    """What is admitted from now on."""
    seen: list[Admission] = []
    launch = core._runner.launch

    def noted(plan: Any, *others: Any) -> Any:
        if plan is not None:
            seen.extend(plan.admissions)
        return launch(plan, *others)

    core._runner.launch = noted  # type: ignore[assignment]
    return seen


def resumed(admissions: list[Admission]) -> list[int]:
    """Of each admission of a request that had generated something: how many of its tokens were not run again."""
    return [each.num_computed for each in admissions if len(each.token_ids) > len(each.request.prompt_token_ids)]


@pytest.mark.parametrize("name", ONES)
def test_every_model_goes_on_behind_checkpoints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same prompts, on hardly more blocks than one needs: the second time they hit, and those that are preempted
    go on behind the checkpoint of their prompts."""
    monkeypatch.setattr("headway.engine.sizes.CHECKPOINTS_PER_SLOT", 2)
    monkeypatch.setattr("headway.engine.sizes.CHECKPOINT_SHARE", 1.0)
    asked = conversation(least=24)
    expected = truth(name, asked)
    core = engine(name, enable_prefix_caching=True, kv_cache_memory_bytes=memory(name, 4, 8, 19))
    admitted = watched(core)
    for turn in range(2):
        for key, answer in run(core, asked).items():
            assert answer.token_ids == expected[key], key
            assert answer.num_cached_tokens >= 40 or not turn, "all begin with what the first turn has left"
    stats = core.stats()
    core.check_integrity()
    core.shutdown()
    assert stats.prefix_cache_hits > 0
    if name not in WITHOUT_BLOCKS:
        assert stats.num_preemptions > 0 and any(count >= 40 for count in resumed(admitted)), resumed(admitted)


def test_the_third_of_many_that_share_a_prefix_hits_it() -> None:
    """The first leaves keys and values, the second a checkpoint where it parts with it; all others hit all of its blocks."""
    rng = random.Random(9)
    stem = [rng.randrange(3, VOCAB) for _ in range(90)]
    core = engine("falcon-h1", enable_prefix_caching=True)
    hits = []
    for number in range(5):
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(14)]
        answer = run(core, [request(str(number), prompt, temperature=0.0, max_tokens=2)])[str(number)]
        hits.append(answer.num_cached_tokens)
    core.check_integrity()
    core.shutdown()
    assert hits[0] == 0 and hits[1] == 0 and hits[2:] == [88] * 3


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1"])
def test_a_shared_prefix_of_300_tokens_is_hit_for_more_than_nine_tenths(name: str) -> None:
    """States alone, and beside attention; questions of other lengths behind the prefix.

    The first request finds nothing. The second finds keys and values, or blocks that stand for them, but no states: the first
    left these at the end of its own prompt alone, since where others will part with it is known only when one does. There the
    second leaves a checkpoint, so the third is the first that can hit. It and all others hit every whole block: 296 tokens.
    """
    rng = random.Random(10)
    stem = [rng.randrange(3, VOCAB) for _ in range(300)]
    longer = {"hf_overrides": {"max_position_embeddings": 400}} if name == "falcon-h1" else {}
    core = engine(name, enable_prefix_caching=True, max_model_len=400, **longer)
    hits = []
    for number in range(7):
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(5 + 9 * number)]
        hits.append(run(core, [request(str(number), prompt, temperature=0.0, max_tokens=3)])[str(number)])
    core.check_integrity()
    core.shutdown()
    found = [answer.num_cached_tokens for answer in hits]
    assert found[:2] == [0, 0] and all(each > 0.9 * len(stem) for each in found[2:]), found
    assert found[2:] == [296] * 5


def test_prompt_logprobs_hit_nothing_and_save_nothing() -> None:
    core = engine("mamba2", enable_prefix_caching=True)
    prompt = list(range(3, 80))
    for number in range(2):
        run(core, [request(str(number), prompt, temperature=0.0, max_tokens=2, prompt_logprobs=1)])
    states = scheduler_of(core)._life.kv.states
    assert states is not None and len(states) == 0
    core.shutdown()


def test_forgotten_prefixes_leave_all_checkpoints_free() -> None:
    core = engine("mamba2", enable_prefix_caching=True)
    run(core, conversation())
    states = scheduler_of(core)._life.kv.states
    assert states is not None and len(states) > 0
    scheduler_of(core)._life.kv.forget_prefixes()
    assert len(states) == 0
    core.check_integrity()
    core.shutdown()
