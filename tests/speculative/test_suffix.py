"""The suffix drafter: tokens, log-probabilities and ends of plain decoding, in fewer steps; answers help those that come
after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.speculative.suffix import SuffixDrafter
from tests.engine.harness import request, run
from tests.engine.test_depths import FEATURES
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, ask_oracle, expected, simulated
from tests.sim.rounding import settle
from tests.speculative.repetitive import LOOPS, repetitive

SMALL = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 72}


def suffix(number: int, **more: Any) -> dict[str, Any]:
    config = {"method": "suffix", "num_speculative_tokens": number, "adaptive": False}
    return {"speculative_config": config | {f"suffix_decoding_{name}": value for name, value in more.items()}}


def on_cpu(**sizes: Any) -> EngineCore:
    core = build_engine(arguments({"device": "cpu"} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


def check(core: EngineCore, batch: list[AddRequest]) -> None:
    answers, truth = run(core, batch), expected(batch)
    for each in batch:
        settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)


@pytest.mark.parametrize(("number", "depth", "requests"), [(2, 4, 3), (4, 1, 1)])
def test_every_feature_on_the_cpu(number: int, depth: int, requests: int) -> None:
    batch = repetitive([*FEATURES, *LOOPS], seed=number)
    core = on_cpu(run_ahead=depth, **suffix(number, max_cached_requests=requests, max_spec_factor=2), **SMALL)
    check(core, batch)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("number", "depth", "graphs"), [(3, 2, True), (4, 4, False)])
def test_on_the_simulated_device(number: int, depth: int, graphs: bool) -> None:
    batch = repetitive(["warm_loop", "loop_alone", "schema", "host_grammar"], seed=20 + number)
    sizes = {"max_num_seqs": 2 if graphs else 4, "enforce_eager": not graphs}
    kept = {"max_cached_requests": 2, "max_spec_factor": 4}
    with simulated(number, run_ahead=depth, **suffix(number, **kept), **(SMALL | sizes)) as (core, _, _):
        check(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs


WARM: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 41}


def accepted(core: EngineCore, each: AddRequest) -> int:
    """Drafts that were right while the request ran alone."""
    before = core.stats().num_accepted_tokens
    check(core, [each])
    return core.stats().num_accepted_tokens - before


@pytest.mark.parametrize("depth", [0, 3])
def test_an_answer_is_guessed_from_the_same_answer_before(depth: int) -> None:
    """Not by whom that is not for: another salt, or no speculation; and not from answers that are not kept."""
    core = on_cpu(run_ahead=depth, **suffix(4, max_spec_factor=4, max_cached_requests=2))
    prompt = [3, 14, 15, 92, 6]

    def ask(name: str, seed: int = 0, salt: str | None = None, **more: Any) -> int:
        each = request(name, prompt, seed=seed, **WARM | more)
        each.cache_salt = salt
        return accepted(core, each)

    alone = ask("secret", salt="mine")
    assert ask("first") <= alone + 2, "an answer with a salt was kept"
    again = ask("again")
    assert again > 25 > 2 * alone, "most of the answer is known"
    assert ask("salted", salt="mine") == alone
    assert ask("off", disable_spec_decode=True) == 0
    ask("other", seed=1)
    assert ask("third") > 25, "two answers are kept"
    ask("fourth", seed=2)
    ask("fifth", seed=3)
    assert ask("forgotten") <= alone + 2
    core.shutdown()


def test_answers_are_kept_while_drafts_rest() -> None:
    """As many as while they do not: what is learned is not lost for the time when they pay again."""
    core = on_cpu(run_ahead=2, **suffix(4, max_spec_factor=4, max_cached_requests=2))
    prompt = [3, 14, 15, 92, 6]
    core._scheduler.width = 1
    assert accepted(core, request("first", prompt, seed=0, **WARM)) == 0
    core._scheduler.width = 5
    assert accepted(core, request("again", prompt, seed=0, **WARM)) > 25
    core.shutdown()


def test_nothing_is_kept_where_that_is_asked_for() -> None:
    core = on_cpu(run_ahead=1, **suffix(4, max_spec_factor=4, max_cached_requests=0))
    found = [accepted(core, request(name, [3, 14, 15, 92, 6], seed=0, **WARM)) for name in "ab"]
    assert found[0] == found[1] < 15
    core.shutdown()


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("number", range(1, 9))
def test_sweep(number: int, depth: int) -> None:
    for seed in range(6):
        batch = repetitive([*FEATURES, *LOOPS], seed=100 * number + seed)
        rule = {"max_cached_requests": seed, "max_spec_factor": 0.5 + seed, "min_token_prob": seed / 8}
        core = on_cpu(
            run_ahead=depth, **suffix(number, **rule), **(SMALL if seed % 2 else {"max_num_batched_tokens": 72})
        )
        check(core, batch)
        core.check_integrity()
        core.shutdown()


@pytest.mark.parametrize(("store_tokens", "kept"), [(2**18, 3 * 2 * 33), (40, 40)])
def test_the_memory_of_answers_is_that_of_the_answers_or_of_the_store(store_tokens: int, kept: int) -> None:
    tables = {"history": torch.zeros(2, 32, dtype=torch.int32), "drafts": torch.zeros(2, 4, dtype=torch.int32)}
    arena: Any = SimpleNamespace(
        num_slots=2, ints=tables["history"], view=lambda name: tables.get(name, torch.zeros(2, dtype=torch.int32))
    )
    drafter = SuffixDrafter(arena, 4, 8, 3, 1.0, 0.1, store_tokens=store_tokens)
    assert drafter._store.numel() == kept
