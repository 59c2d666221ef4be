"""What one step takes, by definition: random queues against a few lines that count, with budgets that are met exactly, and by
one more or less. And where states want a checkpoint, for every row there can be."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from headway.core.cache import CacheGroup, CacheKind
from headway.core.config import SchedulerConfig
from headway.core.encode import EncoderItem
from headway.core.ints import cdiv
from headway.core.messages import AddRequest
from headway.core.plan import Exact, StepPlan, StepResult
from headway.scheduler import Scheduler
from headway.scheduler.cache.manager import KVManager
from headway.scheduler.cache.state import LEAST_BLOCKS, StateCheckpoints
from headway.scheduler.drafts import DraftCounts
from headway.scheduler.request import Request
from tests.scheduler.fake_device import make_request
from tests.scheduler.loop import Loop, make_config


def names(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [each.request.request_id for each in plan.admissions]


def cost_of(costs: dict[str, int], message: AddRequest) -> int:
    return costs[message.request_id]


def admitted(config: SchedulerConfig, queue: list[tuple[str, int, int]]) -> tuple[list[str], list[int]]:
    """Who is admitted to the first step of an idle engine, and how many tokens each runs: (name, tokens, upload) in order."""
    tokens, uploads, blocks = config.max_num_batched_tokens, config.max_upload_ints, config.num_blocks - 1
    found, lens = list[str](), list[int]()
    for name, length, upload in queue:
        headroom = config.num_blocks // config.headroom_divisor if found else 0
        if not tokens or len(found) == config.max_num_seqs or upload > uploads:
            break
        if cdiv(length, config.block_size) + headroom > blocks:
            break
        count = min(length, tokens)
        found.append(name)
        lens.append(count)
        tokens, uploads, blocks = tokens - count, uploads - upload, blocks - cdiv(count, config.block_size)
        if count < length:  # nobody overtakes who is inside its prompt
            break
    return found, lens


@pytest.mark.parametrize("seed", range(4))
def test_the_first_step_of_random_queues(seed: int) -> None:
    rng, ends = random.Random(seed), dict.fromkeys(("tokens", "uploads", "seats"), 0)
    for _ in range(120):
        queue = [(f"r{i}", rng.randint(1, 12), rng.randint(20, 30)) for i in range(6)]
        upto = rng.randrange(1, 6)
        some = queue[:upto]
        config = make_config(  # two of three budgets end with the request ``upto`` - 1, or one before or behind that
            max_num_seqs=rng.choice([3, 6]),
            max_num_batched_tokens=max(6, sum(length for _, length, _ in some) + rng.choice([-1, 0, 1, 20])),
            max_upload_ints=max(30, sum(upload for _, _, upload in some) + rng.choice([-1, 0, 0, 1, 99])),
            num_blocks=rng.choice([16, 33]), headroom_divisor=rng.choice([4, 10]),
        )  # fmt: skip
        costs = {name: upload for name, _, upload in queue}
        scheduler = Scheduler(config, upload_ints=partial(cost_of, costs))
        for name, length, _ in queue:
            scheduler.add(make_request(name, [5] * length, 1, ignore_eos=True, cache_salt=name))
        wanted, lens = admitted(config, queue)
        plan = scheduler.schedule()
        assert plan is not None and (names(plan), plan.query_lens.tolist()) == (wanted, lens)
        spent = sum(upload for name, _, upload in queue if name in wanted)
        ends["tokens"] += sum(lens) == config.max_num_batched_tokens
        ends["uploads"] += spent == config.max_upload_ints
        ends["seats"] += len(wanted) == config.max_num_seqs
    assert min(ends.values()) > 0, "each budget was meant to be met exactly"


def test_a_request_of_the_largest_upload_is_admitted() -> None:
    loop = Loop(make_config(max_upload_ints=9))
    loop.add(*(make_request(name, [1] * 9, 1, ignore_eos=True) for name in "ab"))
    assert names(loop.tick()) == ["a"] and names(loop.tick()) == ["b"]


# -- encoders ---------------------------------------------------------------------------------------------------------

MOST = 16


def heard(name: str, rows: int) -> AddRequest:
    message = make_request(name, [1, 2], 9, ignore_eos=True)
    message.media = [EncoderItem(kind="audio", key=name.encode() * 8, rows=rows, sizes=(), data=b"", first=-1)]
    return message


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_an_encoder_does_in_a_step(beside: bool, more: int, number: int) -> None:
    """``number`` items that make as many outputs as a step may, one less or more; beside rows that decode a quarter."""
    groups = (CacheGroup(), CacheGroup(CacheKind.CROSS, tokens=64))
    scheduler = Scheduler(make_config(num_blocks=400, groups=groups, max_encoder_rows=MOST, max_num_seqs=9))
    if beside:
        scheduler.add(heard("first", 1))
        assert names(scheduler.schedule()) == ["first"]
    most = MOST // 4 if beside else MOST
    sizes = [most // number] * (number - 1)
    sizes.append(most - sum(sizes) + more)
    sizes = [size for size in sizes if size > 0]
    for i, size in enumerate(sizes):
        scheduler.add(heard(f"r{i}", size))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_decode_rows == beside
    fits = len(sizes) if more <= 0 or len(sizes) == 1 else len(sizes) - 1  # a single one goes whatever it makes
    assert len(plan.admissions) == len(plan.encodes) == fits


@pytest.mark.parametrize("free", [0, 1])
def test_outputs_that_are_found_take_the_blocks_they_lie_in(free: int) -> None:
    """A recording's blocks, which nobody holds any more, are found: they are no longer free for others. The pool has room for
    the newcomer's own block and for these, or for one less."""
    groups = (CacheGroup(), CacheGroup(CacheKind.CROSS, tokens=16))
    loop: Any = Scheduler(make_config(num_blocks=30, groups=groups, max_encoder_rows=MOST, headroom_divisor=1000))
    kv = loop._life.kv
    loop.add(heard("first", 16))
    loop.schedule()
    request = loop._life.running.requests()[0]
    loop.abort("first")
    hits = kv.lookup(request)
    assert hits.cross is not None and len(hits.cross) == 4 and all(kv.pool.refs(block) == 0 for block in hits.cross)
    taken = kv.pool.take(kv.pool.num_free - 5 + 1 - free)
    while any(block in taken for block in hits.cross):  # the pool gives blank blocks first
        pytest.fail("the recording's blocks were recycled before blank ones")
    assert kv.fits(request, hits, others_run=False) == bool(free)
    kv.open(request, hits)
    assert all(kv.pool.refs(block) == 1 for block in hits.cross)


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_counted_by_place(seed: int) -> None:
    """Steps of any width, with rows that have no drafts, have ended before, or are prompts."""
    rng, widest = random.Random(seed), 4
    counts, rows, drafted, accepted = DraftCounts(widest), 0, 0, [0] * (widest - 1)
    for step in range(60):
        width, decodes = rng.choice([1, 2, widest]), rng.randrange(1, 5)
        lens = [rng.choice([1, width]) for _ in range(decodes)] + [rng.randrange(1, 9)]
        brought = [rng.randrange(length + 1) for length in lens[:-1]] + [1]
        plan = StepPlan(
            step, np.arange(decodes + 1, dtype=np.int32), np.array(lens, np.int32), np.zeros(decodes + 1, np.int32),
            np.ones(decodes + 1, np.bool_), decodes, width=width,
        )  # fmt: skip
        tokens = np.zeros((decodes + 1, width), np.int32)
        counts.take(plan, StepResult(np.array(brought, np.int32), tokens, np.zeros(decodes + 1, np.int32)))
        for length, number in zip(lens[:decodes], brought[:decodes], strict=True):
            if length > 1 and number:  # a row whose request had ended brings nothing and counts for nothing
                rows, drafted = rows + 1, drafted + length - 1
                for place in range(number - 1):
                    accepted[place] += 1
        assert (counts.rows, counts.drafted, counts.accepted) == (rows, drafted, sum(accepted))
        assert counts.accepted_per_position == accepted
    assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("ends", ["at once", "after a token", "when it fails later", "when it never runs"])
@pytest.mark.parametrize("hit", [0, 8])
def test_cached_tokens_are_told_once_however_a_request_ends(ends: str, hit: int) -> None:
    loop = Loop(make_config())
    prompt = [1, 2, 4, 5, 6, 7, 8, 9, 1, 2]
    loop.add(make_request("first", prompt, 1, ignore_eos=True))
    loop.finish()
    name = "second"
    loop.add(make_request(name, prompt if hit else prompt[::-1], 1 if ends == "at once" else 6, ignore_eos=True))
    updates, told = loop.updates[name], None
    if ends != "when it never runs":
        loop.tick()
        told = hit
    if ends in ("when it fails later", "when it never runs"):
        failed = loop.scheduler.fail(name, "broken")
        assert failed is not None
        updates.append(failed)
    loop.finish()
    assert sum(update.num_cached_tokens for update in updates) == updates[0].num_cached_tokens == (told or 0)
    assert [update.finish_reason for update in updates if update.finish_reason] == (
        ["error"] if "fails" in ends or "never" in ends else ["length"]
    )


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgotten", [0, 1])
def test_every_place_that_wants_a_checkpoint(forgotten: int) -> None:
    """All rows of prompts up to 80 tokens, in blocks of 4: the first of three kinds of places, and of no others."""
    size, every = 4, 24
    states = StateCheckpoints(2, first_slot=4, block_size=size, every=every, forgotten=forgotten)
    for known in range(1, 81):
        last = (known - 1) // size * size - forgotten * size
        for junction in (0, *range(size, known + size, 3 * size)):
            for start in range(known + 1):
                wanted = [
                    place
                    for place in range(start + 1, known)
                    if place % size == 0 and place >= LEAST_BLOCKS * size
                    and (place in (last, junction) or place % every == 0)
                ]  # fmt: skip
                found = states.next_place(Exact(start), Exact(known), Exact(junction))
                assert found == (wanted[0] if wanted else None), (known, junction, start)


@pytest.mark.parametrize("saved", [(), (16,), (24,), (16, 24), (16, 24, 48)])
def test_rows_end_at_the_first_place_whose_states_are_not_kept(saved: tuple[int, ...]) -> None:
    """Places that another request has had are passed over, and the next one counts."""
    size, every = 4, 24
    config = make_config(
        max_model_len=96, num_blocks=99, has_states=True, num_checkpoints=9, checkpoint_every=every, block_size=size
    )
    tokens = np.array([1 + n % 7 for n in range(62)], np.int32)
    for start in range(0, 61, size):
        for end in range(start + 1, 63):
            kv, one = KVManager(config), Request(make_request("a", tokens.tolist(), 1), 96, 0)
            one.junction = Exact(16)
            assert kv.states is not None
            kv._index.extend(one.digests, None, tokens, 15, one.marks)
            for place in saved:
                kv.states.save(one.digests[place // size - 1])
            places = [place for place in (16, 24, 48, 60) if start < place <= end and place not in saved]
            found, slot = kv.row_end(one, tokens, Exact(start), Exact(end), Exact(62))
            assert (found, slot is not None) == ((places[0], True) if places else (end, False)), (start, end)
