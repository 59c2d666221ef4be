"""Random traffic on tiny pools: whatever the depth, every request gets the tokens its prompt determines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.cache import CacheGroup, CacheKind
from headway.core.plan import Finish
from headway.scheduler.request import Status
from tests.examples import examples
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
        "disable_spec_decode": draw(st.sampled_from([False, False, True])),
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
    table, drafts = life.table, loop.config.width > 1
    for request in life.running._decoding:
        if not table.in_flight[request.slot]:  # nothing is uncertain then
            done = table.known[request.slot] - 1
            assert table.scheduled[request.slot] == done and (not drafts or table.least[request.slot] == done)
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
        told = [row.token_ids[0] for u in loop.updates[name] for row in u.new_logprobs or []]
        assert told == expected
    if job.params["prompt_logprobs"] is not None:
        rows = loop.updates[name][0].new_prompt_logprobs
        assert rows is not None and [r.token_ids[0] for r in rows] == job.prompt[1:]
        assert loop.updates[name][0].num_cached_tokens == 0


def run_traffic(
    work: list[Job],
    depth: int,
    pauses: list[bool],
    changes: dict[str, Any],
    acceptance: float = 0.5,
    widths: Sequence[int] = (),
) -> Loop:
    """Runs ``work`` to its end and checks each request's answer. Steps' decode rows have ``widths`` in turn."""
    loop = Loop(make_config(**changes), depth, acceptance)
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
        if widths:
            loop.scheduler.width = 1 + widths[tick % len(widths)] % loop.config.width
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


@examples(250)
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


@examples(250)
@given(
    work=st.lists(jobs(), min_size=1, max_size=7),
    depth=st.integers(0, 4),
    pauses=st.lists(st.booleans(), min_size=1, max_size=7),
    width=st.integers(2, 6),
    acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    changes=st.sampled_from([(4, 24, 4, 0), (5, 9, 1, 3), (2, 7, 8, 1), (3, 16, 2, 5)]),
    widths=st.lists(st.integers(0, 5), max_size=4),
)
def test_rows_of_drafts_bring_the_same_tokens(
    work: list[Job],
    depth: int,
    pauses: list[bool],
    width: int,
    acceptance: float,
    changes: tuple[int, int, int, int],
    widths: list[int],
) -> None:
    """Whatever share of the drafts is accepted, and as their number changes: ends inside a run, preemptions with drafts in
    flight, tight pools."""
    seqs, budget, block_size, extra = changes
    sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "block_size": block_size, "width": width}
    sizes["num_blocks"] = -(-(32 + width - 1) // block_size) + 1 + extra
    run_traffic(work, depth, pauses, sizes, acceptance, widths)


def test_rows_have_as_many_tokens_as_they_were_told() -> None:
    loop = Loop(make_config(width=4), acceptance=1.0)
    loop.add(make_request("a", [1, 2, 4], 20, ignore_eos=True))
    assert loop.tick() is not None and loop.scheduler.width == 4
    for width in (4, 1, 2, 4):
        loop.scheduler.width = width
        plan = loop.tick()
        assert plan is not None and plan.width == width == plan.query_lens.tolist()[0]
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="1 to 4 tokens"):
            loop.scheduler.width = wrong
    loop.finish()


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_rows_of_drafts_under_pressure(acceptance: float) -> None:
    """Not left to chance: preempted with drafts in flight, resumed, hit and evicted; at full acceptance in fewer steps."""
    work = [Job(list(STEMS[i % 3][: 5 + i % 4]), 20, _plain(ignore_eos=i % 2 == 0), i // 3, None) for i in range(12)]
    for depth in range(5):
        sizes = {"num_blocks": 14, "max_num_batched_tokens": 16}
        loop = run_traffic(work, depth, [False], sizes | {"width": 4}, acceptance)
        stats = loop.scheduler.stats()
        assert stats.num_preemptions > 3 and stats.prefix_cache_hits > 0
        if acceptance == 1.0:
            assert stats.num_steps < run_traffic(work, depth, [False], sizes).scheduler.stats().num_steps


def test_a_row_that_may_be_through_pauses_and_goes_on_when_drafts_were_rejected() -> None:
    loop = Loop(make_config(width=4, max_num_batched_tokens=16), 3, acceptance=0.0)
    loop.add(make_request("a", [1, 2, 4], 9, ignore_eos=True))
    assert loop.launch() is not None  # the prompt, and the first token
    plans = [loop.launch() for _ in range(3)]
    assert [None if plan is None else plan.starts_bound.tolist() for plan in plans] == [[3], [7], None], (
        "3 + 8 - 1 = 10"
    )
    loop.collect()
    assert loop.launch() is None, "the first token's result says nothing of drafts"
    loop.collect()  # one token of four
    plan = loop.launch()
    assert plan is not None and plan.starts_bound.tolist() == [8]
    loop.finish()
    assert loop.tokens("a") == predict(make_request("a", [1, 2, 4], 9, ignore_eos=True))[0]


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


WINDOWED = (
    (CacheGroup(CacheKind.WINDOW, 6),),
    (CacheGroup(), CacheGroup(CacheKind.WINDOW, 5)),
    (CacheGroup(CacheKind.WINDOW, 1), CacheGroup(), CacheGroup(CacheKind.WINDOW, 9)),
    (CacheGroup(), CacheGroup(CacheKind.CHUNK, 6)),
    (CacheGroup(CacheKind.CHUNK, 8), CacheGroup(CacheKind.WINDOW, 5)),
)
"""A window of all layers, one beside layers that keep every token, two of different sizes; chunks of a block and a
half, and of two."""


@examples(250)
@given(
    st.lists(jobs(), min_size=1, max_size=8),
    st.integers(0, 4),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.sampled_from(WINDOWED),
    st.integers(0, 30),
    st.integers(1, 3),
    st.booleans(),
)
def test_groups_of_layers_with_windows(
    work: list[Job],
    depth: int,
    pauses: list[bool],
    groups: tuple[CacheGroup, ...],
    spare: int,
    width: int,
    caching: bool,
) -> None:
    """Tiny pools: preemption, prefix hits, aborts, drafts, rows that lag; the device checks each position in each window."""
    config = make_config(groups=groups, width=width, num_blocks=1000)
    changes = {"num_blocks": config.blocks_for(config.max_model_len) + 1 + spare}
    run_traffic(work, depth, pauses, changes | {"groups": groups, "width": width, "enable_prefix_caching": caching})


@examples(150)
@given(
    st.lists(jobs(), min_size=2, max_size=8),
    st.integers(0, 4),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(1, 2),
    st.integers(0, 5),
    st.integers(1, 12),
    st.integers(0, 12),
)
def test_states_go_on_behind_cached_prefixes(
    work: list[Job], depth: int, pauses: list[bool], size: int, checkpoints: int, every: int, spare: int
) -> None:
    """Few checkpoints, tight pools, rows that are cut for one: the device checks whose state each row begins with."""
    changes = {"block_size": size, "num_blocks": 32 // size + 1 + spare, "has_states": True}
    run_traffic(work, depth, pauses, changes | {"num_checkpoints": checkpoints, "checkpoint_every": every})


def test_states_are_saved_hit_and_given_up() -> None:
    """Not left to chance. Requests' states and checkpoints share no slot, and what is loaded spares the prefix."""
    work = [Job([1, 2, 4, 5, 6, 7, 8, 9, *[i % 3] * 4, i, 2, 1], 4, _plain(), 3 * i, None) for i in range(9)]
    changes = {"block_size": 2, "has_states": True, "checkpoint_every": 64, "num_blocks": 60}
    for count, least in ((0, 0), (2, 8), (9, 40)):
        loop = run_traffic(work, 2, [False], changes | {"num_checkpoints": count})
        saved = [each for plan in loop.device.log for each in plan.state_saves]
        loads = [each for plan in loop.device.log for each in plan.state_loads]
        assert bool(saved) == bool(loads) == bool(count)
        assert loop.scheduler.stats().prefix_cache_hits >= least
        assert len({checkpoint for _, checkpoint in saved}) == min(count, len(saved))


def test_a_prompt_that_does_not_fit_is_looked_up_once_until_something_is_freed() -> None:
    """A long prompt's look-up hashes all of it, and the head of the queue is asked for in every step."""
    loop = Loop(make_config(num_blocks=9, max_num_batched_tokens=32))
    loop.add(make_request("a", [1] * 20, 12, ignore_eos=True), make_request("b", [2] * 20, 2, ignore_eos=True))
    kv = loop.scheduler._life.kv
    asked: list[str] = []
    look_up = kv.lookup
    kv.lookup = lambda request: asked.append(request.request_id) or look_up(request)  # type: ignore[method-assign, func-returns-value]
    for _ in range(9):
        loop.tick()
    assert asked == ["a", "b"] and len(loop.tokens("a")) > 4
    loop.finish()
    assert asked == ["a", "b", "b"] and len(loop.tokens("b")) == 2


def test_a_window_gives_its_blocks_back_while_the_request_runs() -> None:
    """Of 32 tokens a layer that sees 6 holds three blocks of 4, not eight."""
    groups = (CacheGroup(), CacheGroup(CacheKind.WINDOW, 6))
    loop = Loop(make_config(groups=groups, max_num_batched_tokens=4, num_blocks=40), depth=2)
    loop.add(make_request("a", [1, 2, 4], 29, ignore_eos=True))
    held: list[tuple[int, int]] = []
    while loop.scheduler.has_unfinished():
        loop.tick()
        for request in loop.scheduler._life.running.requests():
            held.append((sum(map(bool, request.blocks[0])), sum(map(bool, request.blocks[1]))))
    loop.finish()
    assert max(full for full, _ in held) == 8
    assert max(windowed for _, windowed in held) == 3


def test_a_prefix_is_hit_as_far_as_all_groups_have_it() -> None:
    """What lies behind a window need not be cached; the window before the first token that is computed must be."""
    groups = (CacheGroup(), CacheGroup(CacheKind.WINDOW, 6))
    prompt = [1, 2, 4, 5, 6, 7, 8, 9, 1, 2, 4, 5, 1, 1, 2, 2, 4, 4, 5, 5]
    loop = Loop(make_config(groups=groups, num_blocks=40))
    loop.add(make_request("a", prompt, 2, ignore_eos=True))
    loop.finish()
    kv = loop.scheduler._life.kv
    for cut, hit in ((20, 16), (19, 16), (9, 8), (5, 4)):
        loop.add(make_request(str(cut), prompt[:cut], 1, ignore_eos=True))
        loop.finish()
        assert loop.updates[str(cut)][0].num_cached_tokens == hit, cut
    windowed = [kv._index.find(kv_digest, 1) for kv_digest in digests(loop, prompt)]
    assert all(windowed)
    for block in windowed[2:3]:  # evicted: tokens 8 to 11, which tokens 12 to 17 see
        assert block is not None
        kv._index.forget(block)
        kv.pool._cached.pop(block)
        kv.pool._blank.append(block)
    for name, cut, hit in (("b", 20, 8), ("c", 9, 8)):
        loop.add(make_request(name, prompt[:cut], 1, ignore_eos=True))
        loop.finish()
        assert loop.updates[name][0].num_cached_tokens == hit, cut


def digests(loop: Loop, prompt: list[int]) -> list[bytes]:
    kv, found = loop.scheduler._life.kv, list[bytes]()
    kv._index.extend(found, None, np.array(prompt, np.int32), len(prompt) // kv.block_size)
    return found
