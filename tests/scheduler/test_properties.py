"""Random traffic on tiny pools: whatever the depth, every request gets the tokens its prompt determines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.plan import Finish
from headway.scheduler.request import Status
from tests.scheduler.fake_device import VOCAB, make_request, predict
from tests.scheduler.loop import Loop, make_config

STEMS = ([1, 2, 4, 5, 6, 7, 8, 9, 1, 2, 4, 5], [1, 2, 4, 5, 9, 9, 9, 9, 2, 2, 2, 2], [7] * 12)


@dataclass
class Job:
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any]
    arrival: int
    abort_after: int | None
    lags: bool = False


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(0, 12))] + draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
    prompt = prompt or [5]
    # A later turn of a conversation: the prompt goes on with what the model says, so generated blocks can be hit.
    said = predict(make_request("", prompt, 14, ignore_eos=True))[0]
    prompt += said[: draw(st.just(0) | st.integers(0, 14))]
    max_tokens = draw(st.integers(1, 32 - len(prompt)))
    params: dict[str, Any] = {
        "seed": draw(st.sampled_from([0, 0, 1])),
        "min_tokens": draw(st.integers(0, max_tokens)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([[], [2]])),
        "logprobs": draw(st.sampled_from([None, None, 0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 0])),
        "cache_salt": draw(st.sampled_from([None, None, "salt"])),
    }
    abort_after = draw(st.none() | st.none() | st.integers(0, 25))
    lags = draw(st.sampled_from([False, False, True]))
    return Job(prompt, max_tokens, params, draw(st.integers(0, 12)), abort_after, lags)


def check_progress(loop: Loop, arrivals: list[str]) -> None:
    """Order of arrival holds among those running, and before those waiting."""
    life = loop.scheduler._life
    running = [r.request_id for r in life.running.requests()]
    waiting = list(life.waiting._queue)
    order = [name for name in arrivals if name in {*running, *waiting}]
    assert running + waiting == order
    assert all(r.status is Status.RUNNING for r in life.running.requests())
    loop.scheduler.check_integrity()


def check_outcome(loop: Loop, name: str, job: Job, aborted: bool) -> None:
    message = make_request(name, job.prompt, job.max_tokens, **dict(job.params))
    expected, code = predict(message)
    tokens = loop.tokens(name)
    if aborted:
        assert tokens == expected[: len(tokens)]
        return
    assert tokens == expected
    last = loop.updates[name][-1]
    assert last.finish_reason == ("length" if code is Finish.LENGTH else "stop")
    assert last.stop_token_id == (expected[-1] if code is Finish.STOP_TOKEN else None)
    assert all(u.finish_reason is None for u in loop.updates[name][:-1])
    if job.params["logprobs"] is not None:
        assert [u.new_logprobs[0].token_ids[0] for u in loop.updates[name] if u.new_logprobs] == expected
    if job.params["prompt_logprobs"] is not None:
        rows = loop.updates[name][0].new_prompt_logprobs
        assert rows is not None and [r.token_ids[0] for r in rows] == job.prompt[1:]
        assert loop.updates[name][0].num_cached_tokens == 0


def run_traffic(work: list[Job], depth: int, pauses: list[bool], changes: dict[str, Any]) -> Loop:
    loop = Loop(make_config(**changes), depth)
    pending = sorted(range(len(work)), key=lambda i: work[i].arrival)
    arrivals: list[str] = []
    aborted: set[str] = set()
    tick = 0
    while pending or loop.scheduler.has_unfinished() or loop.in_flight:
        while pending and work[pending[0]].arrival <= tick:
            i = pending.pop(0)
            arrivals.append(f"r{i}")
            message = make_request(f"r{i}", work[i].prompt, work[i].max_tokens, **dict(work[i].params))
            message.host_grammar = "grammar" if work[i].lags else None
            loop.add(message)
        for i, job in enumerate(work):
            if job.abort_after is not None and job.arrival + job.abort_after == tick and f"r{i}" in arrivals:
                if loop.scheduler.abort(f"r{i}"):
                    aborted.add(f"r{i}")
        if loop.in_flight and pauses[tick % len(pauses)]:
            loop.collect()  # sometimes results come earlier than the depth demands
        loop.pay(1 + tick % 3 if pauses[-1 - tick % len(pauses)] else tick % 2)
        loop.tick()
        check_progress(loop, arrivals)
        tick += 1
        assert tick < 3000, "no end in sight"
    loop.finish(1)
    for i, job in enumerate(work):
        check_outcome(loop, f"r{i}", job, f"r{i}" in aborted)
    stats = loop.scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0 and stats.kv_cache_usage == 0
    assert stats.generation_tokens == sum(len(loop.tokens(f"r{i}")) for i in range(len(work)))
    return loop


@settings(max_examples=250)
@given(
    work=st.lists(jobs(), min_size=1, max_size=9),
    depth=st.integers(0, 4),
    pauses=st.lists(st.booleans(), min_size=1, max_size=7),
    num_seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
    block_size=st.sampled_from([1, 2, 4, 4, 8]),
    extra_blocks=st.integers(0, 8),
    uploads=st.sampled_from([31, 40, 1000]),
    caching=st.booleans(),
)
def test_every_request_gets_its_tokens(
    work: list[Job],
    depth: int,
    pauses: list[bool],
    num_seqs: int,
    budget: int,
    block_size: int,
    extra_blocks: int,
    uploads: int,
    caching: bool,
) -> None:
    changes: dict[str, Any] = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": budget,
        "block_size": block_size,
        "num_blocks": 32 // block_size + 1 + extra_blocks,
        "max_upload_ints": uploads,
        "enable_prefix_caching": caching,
    }
    run_traffic(work, depth, pauses, changes)


def test_rows_that_lag_under_pressure() -> None:
    """They preempt and are preempted, wait for masks and for blocks, and everybody ends right."""
    for every in (1, 2, 3):
        work = [
            Job(list(STEMS[i % 3][: 5 + i % 4]), 20, _plain(ignore_eos=i % 2 == 0), i // 3, None, i % every == 0)
            for i in range(12)
        ]
        for depth in range(5):
            loop = run_traffic(work, depth, [False, True], {"num_blocks": 14, "max_num_batched_tokens": 12})
            assert loop.scheduler.stats().num_preemptions > 3


def test_pressure_preempts_and_still_gets_everything_right() -> None:
    """Not left to chance: this traffic preempts, resumes with rows in flight, hits and evicts."""
    work = [Job(list(STEMS[i % 3][: 5 + i % 4]), 20, _plain(ignore_eos=i % 2 == 0), i // 3, None) for i in range(12)]
    for depth in range(5):
        loop = run_traffic(work, depth, [False], {"num_blocks": 14, "max_num_batched_tokens": 12})
        stats = loop.scheduler.stats()
        assert stats.num_preemptions > 3 and stats.prefix_cache_hits > 0


def test_later_turns_never_hit_a_position_nobody_wrote() -> None:
    """A request of every length, then one that continues it: the last token's own KV was never computed."""
    for depth in range(4):
        for length in range(1, 14):
            least = {"ignore_eos": True, "min_tokens": length - 1}
            stop = predict(make_request("a", [1, 2, 4], length, **least))[0][-1]
            loop = Loop(make_config(), depth)
            # Stopped by a token, which only the device foresees: the request keeps its blocks to the end.
            loop.add(make_request("a", [1, 2, 4], 20, stop_token_ids=[stop], **least))
            loop.finish()
            said = loop.tokens("a")
            assert len(said) == length
            loop.add(make_request("b", [1, 2, 4, *said, 5], 3, ignore_eos=True))
            loop.finish()
            assert loop.tokens("b") == predict(make_request("b", [1, 2, 4, *said, 5], 3, ignore_eos=True))[0]


def _plain(**params: Any) -> dict[str, Any]:
    base = {"min_tokens": 0, "stop_token_ids": [], "logprobs": None, "prompt_logprobs": None, "cache_salt": None}
    return {**base, **params}
