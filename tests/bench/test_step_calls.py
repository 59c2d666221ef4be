"""The count of CUDA calls per step: from a pretended trace, from pretended callbacks, around a real engine on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.step_calls import FEATURES, MARK, LiveCounting, Watched, calls_in, measure, per_step, requests_of
from headway.syncs import recording
from headway.syncs.counting import Calls
from tests.engine.harness import MakeEngine
from tests.syncs.fake_kineto import FakeResults, call, note, work


def test_calls_of_a_recording_belong_to_the_part_they_lie_in() -> None:
    events = [
        call("cudaDeviceSynchronize", 0, 5),  # before the first mark
        note("step_calls:launch", 10, 40),
        call("cudaMemcpyAsync", 12, 2, correlation=1),
        work("Memcpy HtoD (Pinned -> Device)", 13, 1, correlation=1),
        call("cudaGraphLaunch", 15, 5),
        call("cuGraphLaunch", 16, 2),  # inside the runtime's
        call("cuLaunchKernel", 22, 2),
        call("cudaMemcpyAsync", 25, 2, correlation=2),
        work("Memcpy DtoH (Device -> Pinned)", 40, 1, correlation=2),
        call("cudaStreamSynchronize", 30, 2, lane=2),  # another thread's
        note("step_calls:collect", 50, 20),
        call("cudaEventSynchronize", 52, 9),
        note("step_calls:rest", 70, 20),
        call("cudaEventQuery", 71, 1),
    ]
    calls = calls_in(recording.read(FakeResults(events), MARK, lambda name: True))
    launch = calls["launch"]
    assert (launch.copies, launch.graph_launches, launch.kernel_launches) == ({"HtoD": 1, "DtoH": 1}, 1, 1)
    assert not launch.waits and calls["collect"].waits == {"cudaEventSynchronize": 1}
    assert calls["rest"] == Calls(others=Counter({"cudaEventQuery": 1}))
    line = per_step(calls, steps=1, waits=1)
    assert (line["launch_waits"], line["h2d_per_step"], line["d2h_per_step"]) == (0, 1.0, 1.0)
    assert (line["collect_waits"], line["rest_waits"]) == (1, 0)


class FakeCounter:
    """Each part calls one thing."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> Calls:
        self.taken += 1
        return Calls(copies=Counter({"HtoD": 1}))


@pytest.mark.parametrize("depth", [0, 2])
def test_an_engines_launches_are_told_from_its_collections(make_engine: MakeEngine, depth: int) -> None:
    watched = Watched(make_engine(run_ahead=depth), LiveCounting(FakeCounter()))
    calls, steps, _ = watched.decode(requests_of("mixed", 8, 30, 5))
    assert 15 <= steps <= 30
    assert calls["launch"].copies["HtoD"] == steps
    assert abs(calls["collect"].copies["HtoD"] - steps) <= depth


def test_every_feature_has_a_result_and_an_error_costs_only_its_own(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake() -> nullcontext[tuple[str, LiveCounting]]:
        return nullcontext(("fake", LiveCounting(FakeCounter())))

    monkeypatch.setattr("bench.step_calls.counting", fake)
    saved: list[dict[str, Any]] = []
    core = make_engine(max_num_seqs=len(FEATURES))
    add = core.add

    def fragile(request: Any) -> None:
        if request.request_id == "top_k-0":
            raise RuntimeError("planted")
        add(request)

    core.add = fragile  # type: ignore[method-assign]
    measure(core, rows=3, tokens=12, prompt_len=4, save=saved.append)
    features = saved[-1]["features"]
    assert set(features) == {*FEATURES, "mixed"} - {"max_tokens"} and len(saved) == len(features)
    assert features["top_k"] == {"error": "RuntimeError: planted"}
    assert all(line["steps"] > 0 for name, line in features.items() if name != "top_k")


def test_this_machine_has_what_the_command_needs() -> None:
    assert (Path(__file__).parents[2] / "headway/cli/bench/anchors/models/qwen3_06b/config.json").exists()


def test_counts_go_to_json_as_they_are() -> None:
    calls = Calls()
    calls.add("cudaEventSynchronize", None)
    calls.add("cudaMemcpyAsync", "HtoD")
    calls.add("cudaGraphLaunch", None)
    assert json.loads(json.dumps(calls.to_dict())) == {
        "waits": {"cudaEventSynchronize": 1}, "copies": {"HtoD": 1}, "graph_launches": 1, "kernel_launches": 0,
        "others": {},
    }  # fmt: skip
