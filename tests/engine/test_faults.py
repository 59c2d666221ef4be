"""What goes wrong with one request stays with that request; what goes wrong with a step stays with the step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.device.sim import HostSyncError, RaceError
from headway.engine.boot import build_engine
from headway.runner.runner import ModelRunner
from headway.sampling.sampler import Sampler
from headway.syncs import Kind, Site, SyncError, Wait
from tests.engine.harness import MakeEngine, drain, request, run
from tests.engine.tiny_llama import KV_BLOCK_BYTES


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_that_cannot_be_staged_fails_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    core = make_engine(run_ahead=depth)
    alone = run(core, [request("good", [1, 2, 3], temperature=0.0)])["good"]
    stage = Sampler.stage

    def fragile(self: Sampler, each: Any) -> Any:
        if each.request_id == "bad":
            raise RuntimeError("planted")
        return stage(self, each)

    monkeypatch.setattr(Sampler, "stage", fragile)
    answers = run(core, [request("bad", [1, 2, 3]), request("good2", [1, 2, 3], temperature=0.0)])
    assert answers["bad"].finish_reason == "error" and "planted" in (answers["bad"].error or "")
    assert answers["good2"].token_ids == alone.token_ids


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_that_cannot_be_launched_fails_its_requests_and_leaves_no_wrong_cache(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    core = make_engine(run_ahead=depth)
    prompt = list(range(30))
    expected = run(make_engine(), [request("x", prompt, temperature=0.0)])["x"].token_ids
    launch = ModelRunner.launch
    planted = iter([RuntimeError("planted")])

    def fragile(self: ModelRunner, *given: Any) -> Any:
        for error in planted:
            raise error
        return launch(self, *given)

    monkeypatch.setattr(ModelRunner, "launch", fragile)
    answers = run(core, [request("a", prompt), request("b", prompt)])
    assert {answer.finish_reason for answer in answers.values()} == {"error"}
    after = run(core, [request("c", prompt, temperature=0.0)])["c"]
    assert after.token_ids == expected and after.num_cached_tokens == 0


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RaceError("two accesses"),
        HostSyncError("a host read"),
        SyncError("a wait", Wait(Site("x.py", 1, "f"), Kind.READ, "Tensor.item", 1.0, 0)),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_lost_device_or_a_broken_rule_is_not_hidden(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    core = make_engine()

    def lost(self: Any, *given: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "stage", lost)
        with pytest.raises(type(fault), match=str(fault)):
            core.add(request("a", [1]))
    core.add(request("b", [1]))
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lost)
        with pytest.raises(type(fault), match=str(fault)):
            core.step()
    core.abort("b")


def test_abort_in_every_state(make_engine: MakeEngine) -> None:
    core = make_engine(run_ahead=2, max_num_seqs=2)
    for name in "abcd":
        core.add(request(name, [1, 2, 3], ignore_eos=True, max_tokens=50))
    core.abort("d")
    for _ in range(4):
        core.step()
    core.abort("a")
    core.abort("unknown")
    answers = drain(core)
    assert "d" not in answers and answers["c"].finish_reason == "length" and len(answers["c"].token_ids) == 50
    core.check_integrity()


def test_memory_that_cannot_hold_the_context_says_what_would(make_engine: MakeEngine) -> None:
    with pytest.raises(OutOfMemoryError, match="enough for max_model_len=24"):
        make_engine(max_model_len=128, kv_cache_memory_bytes=4 * KV_BLOCK_BYTES)


def test_a_closed_engine_is_freed(tiny_model: Path) -> None:
    core = build_engine(EngineArgs(model=str(tiny_model), device="cpu", max_model_len=64), progress=False)
    run(core, [request("a", [1, 2])])
    watched = weakref.ref(core._runner)
    core.shutdown()
    del core
    gc.collect()
    assert watched() is None, "the runner, and with it the weights and the KV cache, outlives its engine"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_model_len": 10_000}, "context of 256"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 10}, "max_num_batched_tokens"),
        ({"block_size": 12}, "power of two"),
        ({"run_ahead": 99}, "run_ahead"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_contradictory_arguments_are_refused(make_engine: MakeEngine, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(**overrides)
