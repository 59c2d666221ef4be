"""Each kind of attention through the whole engine: greedy tokens of transformers, and the same tokens on the simulated
device at every depth of run-ahead, in chunks, beside others, behind prefix hits and preemptions, with drafts and 8-bit keys."""

from __future__ import annotations

import functools
import random
from types import MappingProxyType
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.models import registry
from headway.models.decoder import DecoderModel
from headway.models.interface import ALL_TOKENS
from headway.models.load import load_model
from headway.scheduler import Scheduler
from headway.state.cache_pool import bytes_per_block
from headway.weights import open_checkpoint
from tests.attention.kinds import KINDS, OWN, VOCAB, folder_of, greedy
from tests.engine.harness import request, run
from tests.models.harness import DEVICE, Machine, Row
from tests.sim.harness import simulated

CPU: dict[str, Any] = {"device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def some_always(*names: str, without: tuple[str, ...] = ()) -> list[Any]:
    """All kinds but those ``without``, of which the others run with the soak alone."""
    kinds = [name for name in KINDS if name not in without]
    return [name if name in names else pytest.param(name, marks=pytest.mark.soak) for name in kinds]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own architecture is registered."""
    own = {"KindsForCausalLM": "tests.attention.kinds:KindsForCausalLM"}
    monkeypatch.setattr(registry, "ARCHITECTURES", MappingProxyType(dict(registry.ARCHITECTURES) | own))


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": 8, "kv_cache_memory_bytes": 4 * 2**20,
    }  # fmt: skip
    return sizes | changes


def engine(name: str, **changes: Any) -> EngineCore:
    return build_engine(EngineArgs(**arguments(name, **CPU | changes)), progress=False)


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(40)]
    return [
        stem[: rng.choice([0, 24, 40])] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 3, 17, 50, 30, 9, 21)
    ]


def requests(max_tokens: int = 6, **more: Any) -> list[AddRequest]:
    common: dict[str, Any] = {"ignore_eos": True, **more}
    return [
        request(f"r{n}", prompt, seed=n, temperature=1.1 if n % 3 == 2 else 0.0, max_tokens=max_tokens + n, **common)
        for n, prompt in enumerate(prompts())
    ]


@functools.cache
def truth(name: str, dtype: str = "auto", max_tokens: int = 6) -> dict[str, list[int]]:
    core = engine(name, kv_cache_dtype=dtype)
    found = {key: answer.token_ids for key, answer in run(core, requests(max_tokens)).items()}
    core.shutdown()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Two prompts at once, in chunks of up to 23 tokens."""
    core = engine(name, max_num_batched_tokens=23)
    asked = [request(str(n), prompts()[n], temperature=0.0, ignore_eos=True, max_tokens=6) for n in (1, 2)]
    answers = run(core, asked)
    core.shutdown()
    for n in (1, 2):
        assert answers[str(n)].token_ids == greedy(name, prompts()[n], 6)


def check_on_simulated_device(name: str, depth: int, **more: Any) -> None:
    changes = arguments(name, run_ahead=depth, enforce_eager=depth == 2, max_num_batched_tokens=(64, 23)[depth % 2])
    with simulated(7 + depth, **changes | more) as (core, _, _):
        for _ in range(2):  # the second time prompts are cached
            for key, answer in run(core, requests()).items():
                assert answer.token_ids == truth(name)[key], key
        assert core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(("depth", "name"), [(2, "gemma4"), (1, "chunks"), (4, "sinks")])
def test_simulated_device_gives_the_same_tokens(depth: int, name: str) -> None:
    check_on_simulated_device(name, depth)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_at_every_depth(name: str, depth: int) -> None:
    check_on_simulated_device(name, depth)


@pytest.mark.parametrize("name", some_always("sinks"))
def test_drafts_change_nothing(name: str) -> None:
    """Rows of four tokens: a window, a chunk and a sink at each of their positions."""
    check_on_simulated_device(name, 1, speculative_config=NGRAM)


@pytest.mark.parametrize("name", some_always("chunks", without=("sinks", "gemma3n")))
def test_preempted_requests_go_on(name: str) -> None:
    """Hardly more blocks than one request needs, and answers that outgrow what was left when they began. That is never so with
    sinks and Gemma 3n, whose windows give back what they took in with; both kinds are preempted in tests/sim/test_kinds.py."""
    core = engine(name, max_num_seqs=1)
    scheduler = core._scheduler
    assert isinstance(scheduler, Scheduler)
    blocks, layout = scheduler._life.kv.pool.num_blocks, core._runner.executor.body.model.spec.cache
    core.shutdown()
    small = blocks * bytes_per_block(layout, 8, torch.float32)
    changes = arguments(name, run_ahead=2, kv_cache_memory_bytes=small)
    with simulated(5, **changes) as (core, _, _):
        for key, answer in run(core, requests(24)).items():
            assert answer.token_ids == truth(name, max_tokens=24)[key], key
        assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("name", some_always("chunks"))
def test_8_bit_keys(name: str) -> None:
    with simulated(3, **arguments(name, run_ahead=2, kv_cache_dtype="fp8")) as (core, _, _):
        for key, answer in run(core, requests()).items():
            assert answer.token_ids == truth(name, "fp8")[key], key


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_prompt_log_probabilities(name: str) -> None:
    """Rows that ask for them run all layers on all tokens, and their neighbours' tokens stay the same."""
    core = engine(name)
    alone = run(core, [request("a", prompts()[2], temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)])[
        "a"
    ]
    core.shutdown()
    assert len(alone.prompt_logprobs) == len(prompts()[2]) - 1
    with simulated(9, **arguments(name, run_ahead=2)) as (core, _, _):
        some = [each for each in requests() if each.request_id in ("r1", "r3")]
        asking = request("a", prompts()[2], temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
        found = run(core, [*some, asking])
    assert found["a"].token_ids == alone.token_ids
    for mine, theirs in zip(found["a"].prompt_logprobs, alone.prompt_logprobs, strict=True):
        assert mine[1] == pytest.approx(theirs[1], abs=1e-4)
    for each in some:
        assert found[each.request_id].token_ids == truth(name)[each.request_id]


def test_a_step_that_is_run_again_asks_its_rules_again() -> None:
    """As graphs do, whose tensors are written anew: from position 11 on odd heads see a new document."""
    model = load_model(
        open_checkpoint(str(folder_of("flex"))),
        dtype=torch.float32,
        device=DEVICE,
        max_model_len=64,
        progress=False,
        seed=0,
    )
    assert isinstance(model, DecoderModel)
    tokens = prompts()[3][:14]
    wanted = Machine(model).in_chunks(tokens, [14])
    machine = Machine(model)
    machine.step([Row(1, tokens[:10])])
    again = machine.batch([Row(1, tokens[10:11], 10)])
    for position in range(10, 14):
        fresh = machine.batch([Row(1, tokens[position : position + 1], position)])
        for mine, theirs in (
            (again.input_ids, fresh.input_ids), (again.positions, fresh.positions), (again.seq_lens, fresh.seq_lens),
            (again.groups[0].kv_slots, fresh.groups[0].kv_slots),
        ):  # fmt: skip
            mine.copy_(theirs)
        with torch.inference_mode():
            found = model.logits(model.forward(again, machine.caches, ALL_TOKENS).hidden).cpu()
        torch.testing.assert_close(found, wanted[position : position + 1], atol=1e-4, rtol=1e-4)


def test_own_architectures_are_covered() -> None:
    assert set(OWN) <= set(KINDS)
