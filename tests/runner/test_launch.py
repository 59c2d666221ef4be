"""A launch is plain data: whoever gets its bytes alone runs the same step, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.encode import Encoding
from headway.core.plan import Bound, StepResult
from headway.device.staging import Staging
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.runner.executor import Executor, Running
from headway.runner.launch import Launch, LaunchShape, PromptPositions
from headway.sampling.sampler import Variant
from tests.engine.harness import run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, expected, simulated
from tests.sim.rounding import TOLERANCE

numbers = st.integers(0, 2**31 - 1)
sizes = st.lists(numbers, max_size=3).map(tuple)
encodings = st.builds(Encoding, numbers, sizes, numbers, numbers, numbers, numbers, numbers, st.booleans())


@given(data=st.data())
def test_bytes_hold_the_whole_launch(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
    lists = [data.draw(numbers) for _ in range(4)]
    launch = Launch(
        np.array(data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)), np.int32),
        LaunchShape(*[data.draw(numbers) for _ in LaunchShape._fields]),
        Variant(data.draw(numbers), data.draw(numbers), data.draw(st.integers(-1, 128))),
        index=data.draw(numbers),
        num_edits=data.draw(numbers),
        edits_first=data.draw(st.booleans()),
        counted_at=data.draw(numbers),
        num_counted=data.draw(numbers),
        max_seq_len_bound=Bound(data.draw(numbers)),
        context_bound=Bound(data.draw(numbers)),
        prefix_bound=Bound(data.draw(numbers)),
        prompt=data.draw(st.sampled_from([None, PromptPositions(rows, *lists)])),
        encodings=tuple(data.draw(st.lists(encodings, max_size=3))),
        encoder_ints=np.array(data.draw(st.lists(numbers, max_size=5)), np.int32),
        media=data.draw(st.booleans()),
        unsettled=data.draw(numbers),
        most_tokens=data.draw(numbers),
        all_decode=data.draw(st.booleans()),
    )
    copy = Launch.decode(launch.encode())
    for name in Launch.__slots__:
        mine, theirs = getattr(launch, name), getattr(copy, name)
        assert np.array_equal(mine, theirs) if name.endswith("ints") else mine == theirs, name


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 4, b"\x00" * 4, b"\x15\0\0\0" + b"\0" * 100, b"\x7f\0\0\0" + b"\0" * 64]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no launch"):
        Launch.decode(data)


def follow(leader: EngineCore, follower: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every step of ``leader`` runs on the follower's executor, too, from its bytes; gives the bytes of each."""
    sizes: list[int] = []
    both: dict[int, Running] = {}
    run_step, collect = Executor.run, Executor.collect

    def run_both(self: Executor, launch: Launch, staging: Staging | None = None) -> Running:
        data = launch.encode()
        sizes.append(len(data))
        step = run_step(self, launch, staging)
        both[id(step)] = run_step(follower._runner.executor, Launch.decode(data))
        return step

    def collect_both(self: Executor, step: Running) -> StepResult:
        mine, theirs = collect(self, step), collect(follower._runner.executor, both.pop(id(step)))
        same_results(mine, theirs)
        return mine

    monkeypatch.setattr(Executor, "run", run_both)
    monkeypatch.setattr(Executor, "collect", collect_both)
    return sizes


def same_results(mine: StepResult, theirs: StepResult) -> None:
    """Bit for bit."""

    def flat(part: Any) -> list[bytes]:
        return [] if part is None else [getattr(part, name).tobytes() for name in part.__slots__]

    for name in ("counts", "token_ids", "finish"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    assert flat(mine.logprobs) == flat(theirs.logprobs)
    assert mine.prompt_logprobs.keys() == theirs.prompt_logprobs.keys()
    for row, part in mine.prompt_logprobs.items():
        assert flat(part) == flat(theirs.prompt_logprobs[row])


@pytest.mark.parametrize("depth", [0, 2])
def test_an_executor_that_is_fed_with_bytes_alone_gives_the_same(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """All features mixed, prompts in chunks, preemptions. The follower has neither scheduler nor packer in use."""
    small = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 24}
    args = arguments({"device": "cpu", "run_ahead": depth, **small})
    leader, follower = (build_engine(args, progress=False) for _ in range(2))
    for core in (leader, follower):
        core.learn(VOCABULARY)
    follower._runner.packer = None  # type: ignore[assignment]
    sent = follow(leader, follower, monkeypatch)
    answers = run(leader, requests_for(list(FEATURES.values()), seed=2))
    assert len(sent) == leader.stats().num_steps > 0 and leader.stats().num_preemptions > 0
    assert all(answer.error is None for answer in answers.values())
    assert min(sent) < 300, "a step of the rows of the step before takes a header and its edits"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_device_cannot_tell_bytes_from_the_packers_buffer(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    batch = requests_for([FEATURES[name] for name in ("greedy", "presence", "prompt_logprobs", "bad_words")], seed=2)
    step = Executor.run
    with simulated(5, run_ahead=2, enforce_eager=not graphs) as (core, _, _):
        monkeypatch.setattr(Executor, "run", lambda self, launch, staging: step(self, Launch.decode(launch.encode())))
        answers = run(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs
    for request_id, answer in expected(batch).items():
        close(answers[request_id], answer, TOLERANCE)
