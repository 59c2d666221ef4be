"""The engine on a real GPU: graphs equal eager, the GPU's greedy tokens equal the CPU's, and no step waits for the device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.device.base import DeviceError
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.syncs import SyncError
from tests.engine.harness import Answer, drain, request
from tests.engine.test_depths import FEATURES, close
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES, save_tiny_llama
from tests.gpu.guard import no_waits
from tests.runner.small_shapes import use_small_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


def engine(model: Path, **overrides: Any) -> EngineCore:
    args: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "kv_cache_memory_bytes": 200 * KV_BLOCK_BYTES,
    }
    core = build_engine(EngineArgs(**(args | overrides)), progress=False)
    core.learn(VOCABULARY)
    return core


def batch() -> list[AddRequest]:
    rng = random.Random(2)
    return [
        request(f"{name}{i}", [rng.randrange(97) for _ in range(rng.randrange(1, 60))], seed=i, **dict(params))
        for i, (name, params) in enumerate(list(FEATURES.items()) * 2)
    ]


def run(core: EngineCore, requests: list[AddRequest]) -> dict[str, Answer]:
    for each in requests:
        core.add(each)
    answers = drain(core)
    core.check_integrity()
    core.shutdown()
    return answers


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> dict[str, Answer]:
    return run(engine(tiny_model, device="cpu", run_ahead=0), batch())


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4, "auto"])
def test_every_feature_at_every_depth_equals_the_cpu(
    tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, depth: Any, enforce_eager: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with no_waits(monkeypatch):
        answers = run(engine(tiny_model, run_ahead=depth, enforce_eager=enforce_eager), batch())
    assert len(answers) == len(oracle)
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], tolerance=1e-3)


def test_full_steps_as_graphs_equal_the_cpu(
    tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SMALL": (16,), "FEW_ROWS": 8, "LONG_PROMPTS": (2, 4, 8)}.items():
        monkeypatch.setattr(f"headway.runner.prefill_graphs.{name}", value)
    core = engine(tiny_model, run_ahead=2)
    with no_waits(monkeypatch):
        answers = run(core, batch())
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], tolerance=1e-3)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 2])
def test_keys_and_values_in_8_bits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, depth: int, enforce_eager: bool
) -> None:
    """Tokens alone: where sums are a last bit apart a key may be a step of 8 bits apart."""
    expected = run(engine(tiny_model, device="cpu", run_ahead=0, kv_cache_dtype="fp8"), batch())
    torch.backends.cuda.matmul.allow_tf32 = False
    with no_waits(monkeypatch):
        core = engine(tiny_model, run_ahead=depth, enforce_eager=enforce_eager, kv_cache_dtype="fp8")
        answers = run(core, batch())
    assert {name: each.token_ids for name, each in answers.items()} == {
        name: each.token_ids for name, each in expected.items()
    }


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_rows_that_decode_beside_prompts_equal_the_cpu(
    tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Graphs with a bound of decode rows: fewer of them than that, and more."""
    use_small_shapes(monkeypatch)
    core = engine(tiny_model, run_ahead=depth, max_num_seqs=12)
    prompts = [each for each in batch() if each.params.prompt_logprobs is None]
    with no_waits(monkeypatch):
        answers = run(core, prompts)
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], tolerance=1e-3)
    stats = core.stats()
    assert stats.num_graph_steps == stats.num_steps


def test_preemption_on_the_gpu(tiny_model: Path, oracle: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(tiny_model, run_ahead=2, max_num_batched_tokens=24, kv_cache_memory_bytes=18 * KV_BLOCK_BYTES)
    with no_waits(monkeypatch):
        answers = run(core, batch())
    assert core.stats().num_preemptions > 0
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], tolerance=1e-3)


def test_back_pressure_is_the_only_wait(tiny_model: Path) -> None:
    core = engine(tiny_model, run_ahead=2)
    run(core, batch())
    stats = core.stats()
    assert stats.num_steps > 0 and stats.back_pressure_waits <= stats.num_steps


@pytest.mark.parametrize("torch_too", [False, True], ids=["headway's guard", "torch's too"])
def test_the_guard_bites(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, torch_too: bool) -> None:
    """A wait planted in the launch stops the engine."""
    from headway.sampling.sampler import Sampler

    call = Sampler.__call__

    def reading(self: Sampler, logits: torch.Tensor, slots: torch.Tensor, *others: Any) -> Any:
        assert bool((slots < 1000).all())
        return call(self, logits, slots, *others)

    core = engine(tiny_model, run_ahead=2, enforce_eager=True)
    core.add(request("a", [1, 2, 3]))
    monkeypatch.setattr(Sampler, "__call__", reading)
    bites = pytest.raises((SyncError, DeviceError), match=r"waited for the device|synchronizing CUDA")
    with no_waits(monkeypatch, torch_too=torch_too), bites:
        core.step()
    core.abort("a")
    core.shutdown()


def test_waits_are_counted_in_production(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(tiny_model, run_ahead=2, count_host_waits=True)
    for each in batch():
        core.add(each)
    drain(core)
    assert core.stats().host_waits == {}
    launch = core._runner.launch

    def careless(*given: Any) -> Any:
        torch.cuda.synchronize()
        core._runner.executor.body.packed[:1].tolist()
        return launch(*given)

    monkeypatch.setattr(core._runner, "launch", careless)
    core.add(request("late", [1, 2, 3], max_tokens=1))
    drain(core)
    counts = core.stats().host_waits
    assert counts is not None and counts["device"] == 1 and counts["other"] >= 1
    core.shutdown()
