"""Starting an engine: all kernels compile together before anything is launched, and phases are timed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.cli.bench.anchors.context import MODELS
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.warm_up import PhaseTimes, hidden_from
from headway.models.load import describe
from headway.weights import open_checkpoint
from tests.engine.paced_device import PacedDevice
from tests.kernels.compiler_process import run_module

MOST_KERNELS = 90
"""Specialisations that a start of Qwen3-0.6B may compile, with the tiles of Hopper's decode attention. One takes 0.05 to 1 s of
a core, and a tenth of that of all."""


def boot(cache: Path, broken: str = "", kv_cache_dtype: str = "auto", model: str = "qwen3_06b") -> dict[str, Any]:
    pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
    told: dict[str, Any] = json.loads(run_module("tests.kernels.dry_boot", cache, broken, kv_cache_dtype, model))
    return told


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_all_kernels_compile_in_the_pool_and_none_while_serving(tmp_path: Path, kv_cache_dtype: str) -> None:
    told = boot(tmp_path, kv_cache_dtype=kv_cache_dtype)
    late = [name for name, thread in told["compiled"] if not thread.startswith("headway-compile")]
    assert late == [], "compiled where they were first launched: no rehearsal ran them"
    names = Counter(name for name, _ in told["compiled"])
    assert {
        "race_kernel",
        "finish_kernel",
        "early_decode_kernel",
        "prefill_kernel",
        "step_unpack_kernel",
    } <= names.keys()
    assert names.total() <= MOST_KERNELS, f"more specialisations make a first start slower: {names}"
    assert told["launched"] > 1000 and "error" not in told


def test_no_kernel_compiles_while_texts_are_served(tmp_path: Path) -> None:
    """Of models that pool: with what Hopper alone has for them."""
    told = boot(tmp_path, model="bert_base")
    assert [name for name, thread in told["compiled"] if not thread.startswith("headway-compile")] == []
    names = {name for name, _ in told["compiled"]}
    assert {"overlapped_dense_kernel", "dense_kernel", "sums_kernel", "turns_kernel"} <= names and "error" not in told


def test_a_kernel_that_does_not_compile_stops_the_start(tmp_path: Path) -> None:
    told = boot(tmp_path, "gate_mul_kernel")
    assert told["error"] == ["no such instruction", "while compiling headway.kernels.silu_mul.triton.gate_mul_kernel"]
    assert told["launched"] == 0


def test_phases_are_added_up_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.5])
    monkeypatch.setattr("headway.engine.warm_up.time.perf_counter", lambda: next(clock))
    times = PhaseTimes()
    for name in ("weights", "kernels", "weights"):
        with times.phase(name):
            pass
    assert times.seconds == {"weights": 4.5, "kernels": 2.0}
    assert str(times) == "weights 4.50, kernels 2.00"


@pytest.mark.parametrize("on", [True, False])
def test_graphs_of_steps_with_prompts_can_be_switched_off(
    on: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_PREFILL_GRAPHS", str(int(on)))
    args = EngineArgs(model=str(tiny_model), dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 24)
    core = build_engine(args, progress=False, device=PacedDevice(1.0))
    prompt, params = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    core.add(AddRequest(request_id="a", prompt_token_ids=prompt, params=params, seed=0, eos_token_ids=[]))
    while core.has_work():
        core.step()
    stats = core.stats()
    assert [each.replayed for each in stats.recent_steps][:1] == [on]
    assert sum(each.replayed for each in stats.recent_steps) == stats.num_graph_steps
    core.shutdown()


def test_a_step_whose_launches_are_hidden_is_not_padded_by_much(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.warm_up.FLOPS", 0.0)  # a device that takes for ever
    args = EngineArgs(model=str(tiny_model), dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 24)
    core = build_engine(args, progress=False, device=PacedDevice(1.0))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    for number, (length, replayed) in enumerate([(9, 0), (16, 1)]):
        core.add(
            AddRequest(request_id=str(number), prompt_token_ids=[1] * length, params=params, seed=0, eos_token_ids=[])
        )
        while core.has_work():
            core.step()
        assert core.stats().num_graph_steps == replayed
    assert [each.replayed for each in core.stats().recent_steps] == [False, True]
    core.shutdown()


@pytest.mark.parametrize(("shape", "least", "most"), [("qwen3_06b", 8192, 20_000), ("llama_8b", 1024, 1536)])
def test_small_models_are_bound_by_launches_and_large_ones_are_not(shape: str, least: int, most: int) -> None:
    spec = describe(open_checkpoint(str(MODELS / shape), load_format="dummy").config)
    assert least < hidden_from(spec) < most
