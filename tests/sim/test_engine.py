"""R1, R2, R8: the engine's real code on the simulated device gives the oracle's answers, whatever the depth and the seed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

from headway.core.plan import StepPlan
from headway.device.sim import HostSyncError, InvariantError, RaceError
from headway.device.sim.timeline import Task
from headway.engine.core import EngineCore
from headway.engine.host_grammars import HostGrammars, Next
from headway.runner.graphs import DecodeGraphs
from headway.runner.launch import LaunchShape
from headway.runner.prefill_graphs import PrefillGraphs
from headway.runner.split_step import Replayed
from headway.sampling.sampler import Variant
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import host_grammar
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.examples import examples
from tests.runner.small_shapes import use_small_shapes
from tests.sim.harness import SMALL_SEEDS, expected, play, simulated
from tests.sim.rounding import TOLERANCE

SMALL_POOL = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 24}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations: threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(answers: dict[str, Answer], oracle: dict[str, Answer]) -> None:
    assert answers.keys() == oracle.keys()
    for request_id, answer in answers.items():
        close(answer, oracle[request_id], TOLERANCE)


@pytest.mark.parametrize(("depth", "seed"), [(0, 1), pytest.param(2, 2, marks=pytest.mark.soak), (4, 3)])
def test_keys_and_values_in_8_bits(depth: int, seed: int) -> None:
    """A rounding of sums in another order may become a step of 8 bits, so the oracle is the simulated device's own depth 0."""
    batch = requests_for([{"temperature": 0.0}, {"temperature": 1.3}, {"logprobs": 5}, {"top_k": 5}] * 3, seed=1)
    with simulated(0, run_ahead=0, kv_cache_dtype="fp8") as (core, _, _):
        oracle = run(core, batch)
    with simulated(seed, run_ahead=depth, kv_cache_dtype="fp8") as (core, _, watch):
        compare(run(core, batch), oracle)
        assert watch.num_steps == core.stats().num_steps > 0


def case(often: bool, *values: Any) -> Any:
    """Run every time, or with the long sweeps: graphs and none, either pool and each depth, but not every mixture."""
    words = ("graphs" if each is True else "eager" if each is False else str(each) for each in values)
    return pytest.param(*values, id="-".join(words), marks=() if often else pytest.mark.soak)


@pytest.mark.parametrize(
    ("depth", "seed", "graphs"),
    [
        case((depth, graphs) in [(1, False), (2, True), (4, False)] and graphs == (seed % 2 == 0), depth, seed, graphs)
        for depth, seed in [(1, 0), (1, 1), (2, 2), (2, 3), (4, 4), (4, 5)]
        for graphs in (True, False)
    ],
)
def test_every_feature(depth: int, seed: int, graphs: bool) -> None:
    with simulated(seed, run_ahead=depth, enforce_eager=not graphs) as (core, _, watch):
        for feature, params in FEATURES.items():
            batch = requests_for([params] * 4, seed=1)
            try:
                compare(run(core, batch), expected(batch))
            except BaseException as error:
                error.add_note(f"feature {feature}")
                raise
        assert watch.num_steps == core.stats().num_steps > 0


@pytest.mark.parametrize(
    ("depth", "seed", "graphs", "pool"),
    [
        case(
            (graphs, pool) == (seed not in (7, 8, 12), "roomy" if seed in (6, 7, 10) else "small"),
            depth,
            seed,
            graphs,
            pool,
        )
        for depth, seed in [(0, 6), (1, 7), (2, 8), (4, 9), (8, 10), ("auto", 11), ("auto", 12)]
        for graphs in (True, False)
        for pool in ("roomy", "small")
    ],
)
def test_mixed_features(depth: Any, seed: int, graphs: bool, pool: str) -> None:
    """More requests than slots, prompts cut into chunks, and (small) preemptions."""
    batch = requests_for(list(FEATURES.values()) * 2, seed=2)
    memory = SMALL_POOL if pool == "small" else {}
    with simulated(seed, run_ahead=depth, enforce_eager=not graphs, **memory) as (core, _, watch):
        compare(run(core, batch), expected(batch))
        if pool == "small":
            assert core.stats().num_preemptions > 0
        if depth not in (0, "auto"):
            assert watch.num_zombie_rows > 0, "requests end on the device before the host knows"


@pytest.fixture
def prefill_replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """Small shapes of all kinds; of each replayed one what it is, and (rows, decode rows) of the step."""
    use_small_shapes(monkeypatch)
    seen: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    shape_for = PrefillGraphs.shape_for

    def watched(self: PrefillGraphs, tokens: int, rows: int, decode_rows: int, *others: int) -> LaunchShape:
        shape = shape_for(self, tokens, rows, decode_rows, *others)
        assert shape is not None
        seen.append((shape, (rows, decode_rows)))
        return shape

    monkeypatch.setattr(PrefillGraphs, "shape_for", watched)
    return seen


@pytest.mark.parametrize(
    ("depth", "pool"),
    [
        case((pool == "roomy") == (depth in (0, 2)), depth, pool)
        for depth in (0, 1, 2, 4)
        for pool in ("roomy", "small")
    ],
)
def test_rows_that_decode_beside_prompts(
    prefill_replays: list[tuple[tuple[int, ...], tuple[int, int]]], depth: int, pool: str
) -> None:
    """Prompts come in while others generate; some are cut into chunks, share a prefix, or start again after a preemption."""
    names = ("greedy", "presence", "top_p", "logprobs", "bad_words", "stop_token_ids")
    lengths = (4, 9, 3, 40, 5, 30, 1, 12, 3, 60, 2, 8, 17, 3, 50, 6)
    batch = [
        request(str(i), [*range(8 * (i % 3)), *((7 * i + j) % 60 for j in range(length))], max_tokens=5 + 5 * (i % 4),
                **FEATURES[names[i % 6]])
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 32}
    if pool == "small":
        sizes["kv_cache_memory_bytes"] = 24 * KV_BLOCK_BYTES
    with simulated(31 + depth, run_ahead=depth, **sizes) as (core, _, _):
        compare(run(core, batch), expected(batch))
        if pool == "small":
            assert core.stats().num_preemptions > 0
    mixed = [(shape[2], rows, decode) for shape, (rows, decode) in prefill_replays if decode]
    assert any(decode < bound for bound, _, decode in mixed)
    assert any(bound and rows - decode > 1 for bound, rows, decode in mixed)
    if pool == "roomy" and depth == 0:  # deeper, the device's random pace decides
        assert any(0 < bound < decode for bound, _, decode in mixed), "rows beyond the bound are prompts"
        assert any(not bound for bound, _, _ in mixed)


def test_a_step_that_says_nothing_of_its_decode_rows_is_reported(
    prefill_replays: list[tuple[tuple[int, ...], tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.state.packed_step import PackedRows

    init = PackedRows.__init__

    def forgetful(self: PackedRows, plan: StepPlan) -> None:
        init(self, plan)
        self.header[6] = 0

    batch = [request(str(i), [i, 1 + i, 2], max_tokens=9) for i in range(6)] + [request("x", [*range(60)])]

    def play_it() -> None:
        with simulated(3, run_ahead=2) as (core, _, _):
            monkeypatch.setattr(PackedRows, "__init__", forgetful)
            run(core, batch)

    with pytest.raises(InvariantError, match="decode rows"):
        play_it()


def test_steps_of_more_edits_than_the_prefill_graphs_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runner.executor.max_edits", lambda *sizes: 9)
    batch = requests_for([FEATURES[name] for name in ("greedy", "bad_words", "stop_token_ids")] * 2, seed=4)
    with simulated(15, run_ahead=2) as (core, _, _):
        compare(run(core, batch), expected(batch))


@pytest.mark.parametrize("depth", [0, 2])
def test_full_steps_are_graphs(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Prompts of one and of several steps, whole steps of them and nearly whole ones; rows that decode join some."""
    for name, value in {"SMALL": (8,), "FEW_ROWS": 4, "LONG_PROMPTS": (2, 8)}.items():
        monkeypatch.setattr(f"headway.runner.prefill_graphs.{name}", value)
    seen: list[tuple[int, ...]] = []
    replay = PrefillGraphs.replay

    def watched(self: PrefillGraphs, shape: LaunchShape, variant: Variant) -> Replayed:
        seen.append(shape[:4])
        return replay(self, shape, variant)

    monkeypatch.setattr(PrefillGraphs, "replay", watched)
    batch = [
        request(str(i), [(7 * i + j) % 60 for j in range(length)], max_tokens=3, **FEATURES["presence"])
        for i, length in enumerate((4, 4, 3, 4, 90, 31, 1, 3))
    ]
    with simulated(21, run_ahead=depth, max_num_batched_tokens=16) as (core, _, _):
        compare(run(core, batch), expected(batch))
    assert {(16, 8, 0, 4), (16, 2, 0, 16)} <= set(seen)


@pytest.mark.parametrize(("depth", "lengths"), [(0, (8, 8)), (2, (7, 3))])
def test_a_graph_applies_more_edits_than_its_step_has_rows(
    monkeypatch: pytest.MonkeyPatch, depth: int, lengths: tuple[int, int]
) -> None:
    """A row that lags takes the last block; the older row needs one too, preempts it, and is alone with the edits of both."""
    seen: list[tuple[int, int]] = []
    shape_for = DecodeGraphs.shape_for

    def watched(self: DecodeGraphs, num_rows: int, num_edits: int, width: int) -> LaunchShape | None:
        seen.append((num_rows, num_edits))
        return shape_for(self, num_rows, num_edits, width)

    ready = HostGrammars.ready

    def complete(self: HostGrammars) -> list[Next]:
        wait(self._pending)  # masks come from a thread; the sizes below need each at once
        return ready(self)

    monkeypatch.setattr(DecodeGraphs, "shape_for", watched)
    monkeypatch.setattr(HostGrammars, "ready", complete)
    older, newer = ([*range(length)] for length in lengths)
    grammar = host_grammar("grammar", 'start: item+\nitem: "a" item "b" | "q" | "z"')
    batch = [
        request("a", older, max_tokens=20, ignore_eos=True),
        request("b", [50 + each for each in newer], max_tokens=20, min_tokens=14, host_grammar=grammar),
    ]
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "kv_cache_memory_bytes": 6 * KV_BLOCK_BYTES}
    with simulated(0, run_ahead=depth, max_num_batched_tokens=32, **sizes) as (core, _, _):
        compare(run(core, batch), expected(batch))
    assert (1, 2) in seen, "the sizes are to bring such a step about"


def test_shutting_down_waits_for_the_launched_steps() -> None:
    with simulated(14, run_ahead=4) as (core, device, _):
        device.timeline.main.speed = device.timeline.copies.speed = 0.0
        core.add(request("a", [1, 2, 3], ignore_eos=True, max_tokens=30))
        for _ in range(4):
            core.step()
        pending = [item for item in device.timeline.main.queue if isinstance(item, Task)]
        core.abort("a")
        core.shutdown()
        assert pending and not any(item in device.timeline.main.queue for item in pending)


def test_the_pacer_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs dry makes it run further ahead; one that never finishes early does not."""
    depths = {}
    for name, speeds in (("fast", (1.0, 1.0)), ("slow", (0.0, 0.0))):
        with simulated(0, run_ahead="auto") as (core, device, _):
            device.timeline.main.speed, device.timeline.copies.speed = speeds
            timeline = device.timeline  # the host's work is timed by the device's clock: an operation is a microsecond
            for module in ("core", "metrics"):
                monkeypatch.setattr(f"headway.engine.{module}.perf_counter", lambda at=timeline: at.num_executed * 1e-6)
            run(core, requests_for([{"ignore_eos": True, "max_tokens": 30}] * 3, seed=1))
            depths[name] = core.stats().run_ahead
    assert depths["fast"] > depths["slow"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@examples(20, phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
@given(data=st.data())
def test_random_scenarios(part: int, data: st.DataObject) -> None:
    """Random requests, arrivals, aborts, sizes, depths and devices, all drawn from one number."""
    step = SMALL_SEEDS // 6
    play(data.draw(st.integers(part * step, (part + 1) * step - 1)))


@pytest.mark.soak
@examples(2000, phases=[Phase.explicit, Phase.generate], database=None, derandomize=False)
@given(seed=st.integers(0, 10**9))
def test_many_random_scenarios(seed: int) -> None:
    play(seed)


# -- what an engine that breaks the rules looks like ------------------------------------------------------------------


def play_one(core: EngineCore) -> None:
    run(core, [request("a", list(range(20)), temperature=0.0), request("b", [1, 2, 3])])


def test_a_host_read_in_the_launch_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.sampling.sampler import Sampler

    call = Sampler.__call__

    def reading(self: Sampler, logits: torch.Tensor, slots: torch.Tensor, *others: Any) -> Any:
        if bool((slots < 0).all()):
            return None
        return call(self, logits, slots, *others)

    where = r"test_engine\.py:\d+ in reading: if bool\(\(slots < 0\)\.all\(\)\)"

    def play_it() -> None:
        with simulated(1, run_ahead=2, enforce_eager=True) as (core, _, _):
            monkeypatch.setattr(Sampler, "__call__", reading)
            with pytest.raises(HostSyncError, match=where):  # out of the loop itself: no request is failed for it
                play_one(core)
            for name in "ab":
                core.abort(name)

    with pytest.raises(HostSyncError, match=where):  # and again by the device, had anybody swallowed it
        play_it()


def test_a_bound_that_is_too_small_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.runner.batch_buffers import BatchBuffers

    unpack = BatchBuffers.unpack

    def narrow(self: BatchBuffers, packed: torch.Tensor, **numbers: Any) -> Any:
        return unpack(self, packed, **(numbers | {"max_seq_len_bound": numbers["max_seq_len_bound"] - 1}))

    def play_it() -> None:
        with simulated(1, run_ahead=2, enforce_eager=True) as (core, _, _):
            monkeypatch.setattr(BatchBuffers, "unpack", narrow)
            play_one(core)

    with pytest.raises(InvariantError, match="max_seq_len_bound"):
        play_it()


def test_a_ring_that_ignores_its_fences_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.device.staging import Staging, StagingRing

    acquire = StagingRing.acquire

    def careless(self: StagingRing) -> Staging:
        return self._free_when_fenced.pop(0) if self._free_when_fenced else acquire(self)

    def play_it() -> None:
        with simulated(2, run_ahead=4) as (core, _, _):
            monkeypatch.setattr(StagingRing, "acquire", careless)
            play_one(core)

    with pytest.raises(RaceError, match="rewrote a staging buffer"):
        play_it()
