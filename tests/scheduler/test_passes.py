"""Encoder passes cut over steps: how much a step does of them, and that every reader finds its features, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from headway.core.encode import ALL_BLOCKS, BlockCost, EncodeJob, EncoderItem, MediaRun
from headway.core.messages import AddRequest
from headway.core.plan import StepPlan
from headway.scheduler.media import MediaPlanner
from headway.scheduler.passes import Passes
from headway.scheduler.request import Request
from tests.scheduler.fake_device import VOCAB, make_request, predict
from tests.scheduler.loop import Loop, make_config

BLOCKS = (BlockCost(10, 1), BlockCost(10, 1, windowed=True), BlockCost(10, 1))


def item(key: str, rows: int) -> EncoderItem:
    """Of as many units as rows; blocks cost 10 + rows, 12 and 10 + rows each."""
    return EncoderItem(kind="image", key=key.encode(), rows=rows, first=0, units=rows, reach=(rows, 2))


def job(key: str, rows: int) -> EncodeJob:
    return EncodeJob(0, item(key, rows), np.arange(rows, dtype=np.int32), key)


def done(passes: Passes, beside_decode: bool = True) -> list[tuple[object, int, int]]:
    """(item, first block, end) of what a step does; the end of the last block is 3."""
    passes.begin(beside_decode)
    passes.run()
    assert all(each.is_last == (each.end == ALL_BLOCKS) for each in passes.jobs)
    return [(each.name, each.first, min(each.end, len(BLOCKS))) for each in passes.jobs]


def make_passes(work: int, rows: int = 100) -> Passes:
    return Passes(make_config(encoder_blocks=BLOCKS, encoder_work=work, max_encoder_rows=rows))


def test_a_pass_is_cut_by_what_its_blocks_cost() -> None:
    passes = make_passes(80)  # of 3 rows: 39, 36 and 39
    passes.ask(job("a", 3))
    passes.ask(job("b", 3))
    assert done(passes) == [("a", 0, 2)] and "a" in passes
    assert done(passes) == [("a", 2, 3), ("b", 0, 1)] and "a" not in passes and "b" in passes
    assert done(passes) == [("b", 1, 3)] and "b" not in passes
    assert done(passes) == []


def test_a_step_does_a_block_at_least_and_everything_where_nobody_decodes() -> None:
    passes = make_passes(1)
    passes.ask(job("a", 3))
    assert [done(passes) for _ in range(3)] == [[("a", 0, 1)], [("a", 1, 2)], [("a", 2, 3)]]
    passes.ask(job("b", 3))
    passes.ask(job("c", 3))
    assert done(passes) == [("b", 0, 1)]
    assert done(passes, beside_decode=False) == [("b", 1, 3), ("c", 0, 3)]


def test_recordings_pass_blocks_of_their_own() -> None:
    """More of them than pictures do, and dearer ones; passes of both kinds end in the order in which they were asked for."""
    sounds = (BlockCost(70, 0),) * 5
    passes = Passes(
        make_config(encoder_blocks=BLOCKS, sound_blocks=sounds, encoder_work=220, max_encoder_rows=100)
    )  # of 3 rows: 210 each
    heard = job("a", 3)
    heard.item = structs.replace(heard.item, kind="audio")
    passes.ask(heard)
    passes.ask(job("b", 3))
    steps = []
    while "b" in passes:
        passes.begin(True)
        passes.run()
        steps.append([(each.name, each.first, each.end, each.is_last) for each in passes.jobs])
    assert steps == [
        *([("a", number, number + 1, False)] for number in range(4)),
        [("a", 4, ALL_BLOCKS, True)],
        [("b", 0, ALL_BLOCKS, True)],
    ]


def test_inputs_of_a_step_are_bounded() -> None:
    passes = make_passes(10**6, rows=5)
    for key in "abc":
        passes.ask(job(key, 3))
    assert done(passes) == [("a", 0, 3)]
    assert done(passes) == [("b", 0, 3)]


def test_what_nobody_reads_is_done_no_further_and_begins_anew() -> None:
    passes = make_passes(1)
    passes.ask(job("a", 3))
    assert done(passes) == [("a", 0, 1)]
    passes.drop("a")
    assert done(passes) == []
    passes.ask(job("a", 3))
    assert done(passes) == [("a", 0, 1)]
    passes.ask(job("a", 3))  # the step before was never launched
    assert done(passes) == [("a", 0, 1)]


class Sighted(Loop):
    """A loop whose device encodes: one item's activations at a time, and features in a cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.features: dict[int, tuple[bytes, int]] = {}
        self.open: tuple[bytes, int] | None = None
        self.cut = 0
        self.most_work = 0

    def launch(self) -> StepPlan | None:
        plan = super().launch()
        if plan is not None:
            self.encode(plan)
            self.read(plan)
        return plan

    def encode(self, plan: StepPlan) -> None:
        for each in plan.encodes:
            if each.first:
                assert self.open == (each.item.key, each.first), "the buffers hold another pass"
            self.open = None if each.is_last else (each.item.key, each.end)
            self.cut += not each.is_last
            if each.is_last:
                for output, place in enumerate(each.places.tolist()):
                    assert 0 <= place < self.config.encoder_cache_rows
                    self.features[place] = each.item.key, output
        if plan.num_decode_rows and len(plan.encodes) > 1:
            spent = sum(c.of(e.item) for e in plan.encodes for c in BLOCKS[e.first : min(e.end, len(BLOCKS))])
            assert spent <= self.config.encoder_work

    def read(self, plan: StepPlan) -> None:
        rows = {(slot, run): row for slot, run, row in plan.media_rows}
        starts, lens = plan.starts_bound.tolist(), plan.query_lens.tolist()
        for slot, start, count, owner in zip(plan.slots.tolist(), starts, lens, plan.owners, strict=True):
            message: AddRequest = owner.message  # type: ignore[attr-defined]
            touched = 0
            for number, run in enumerate(message.runs):
                if run.end <= start or run.start >= start + count:
                    continue
                touched = max(touched, min(run.end, start + count) - max(run.start, start))
                for position in range(max(run.start, start), min(run.end, start + count)):
                    at = rows[slot, number] + position - run.start
                    wanted = message.media[run.item].key, run.first + position - run.start
                    assert self.features.get(at) == wanted, "a token reads features that are not its picture's"
            if touched and plan.num_decode_rows and self.config.media_tokens and not self.config.sees:
                assert count <= self.config.media_tokens


def pictured(name: str, rng: Random, pictures: int) -> AddRequest:
    """Text and pictures in turn."""
    prompt: list[int] = [rng.randrange(VOCAB)]
    runs, media = [], []
    for number in range(pictures):
        key = rng.randrange(6)
        one = item(f"{key}", 2 + key)
        runs.append(MediaRun(item=number, start=len(prompt), end=len(prompt) + one.rows))
        media.append(one)
        # Equal pictures are equal tokens, so that the device's hash chain stands for what was read.
        prompt += [key % VOCAB] * one.rows + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 3))]
    message = make_request(name, prompt, rng.randrange(1, 32 - len(prompt)), ignore_eos=True)
    message.media, message.runs = media, runs
    return message


@pytest.mark.parametrize("sees", ["", "spans", "prompt"])
@pytest.mark.parametrize("depth", [0, 2])
def test_random_traffic(sees: str, depth: int) -> None:
    """Arrivals, aborts, preemptions and steps that fail, on few blocks and few rows of the encoder cache."""
    cut = preempted = 0
    for seed in range(25):
        rng = Random(seed)
        options: dict[str, Any] = {
            "encoder_blocks": BLOCKS, "encoder_work": rng.choice([1, 150, 400]), "max_encoder_rows": 8,
            "encoder_cache_rows": rng.choice([14, 21] if sees == "prompt" else [8, 21]),
            "media_tokens": rng.choice([0, 4]), "num_blocks": rng.choice([11, 33]),
            "max_num_batched_tokens": 28 if sees == "prompt" else 14, "sees": sees, "longest_whole": 24,
        }  # fmt: skip
        loop = Sighted(make_config(**options), depth)
        asked, gone = dict[str, AddRequest](), set[str]()
        for turn in range(60):
            if rng.random() < 0.3 and turn < 40:
                message = pictured(f"{turn}", rng, rng.randrange(3))
                asked[message.request_id] = message
                loop.add(message)
            if rng.random() < 0.08 and asked:
                name = rng.choice(list(asked))
                if loop.scheduler.abort(name):
                    gone.add(name)
            if rng.random() < 0.08:
                gone |= fail_a_step(loop)
            loop.tick()
            loop.scheduler.check_integrity()
        loop.finish()
        for name, message in asked.items():
            if name not in gone:
                assert loop.tokens(name) == predict(message)[0], (seed, name)
        cut += loop.cut
        preempted += loop.scheduler.stats().num_preemptions
        media = loop.scheduler._life.media
        assert media is not None
        media.cache.check(media.num_leaving)
    assert cut > 50 and preempted > 5


def fail_a_step(loop: Sighted) -> set[str]:
    """The next step cannot be launched: its requests fail, and the encoder has done nothing of it."""
    plan = loop.scheduler.schedule()
    if plan is None:
        return set()
    failed = loop.scheduler.discard(plan, "a fault")
    loop.device.log.append(replace(plan))  # the number stays unused
    return {update.request_id for update in failed}


def test_a_request_that_is_overtaken_gives_its_room_back() -> None:
    """It waits first in the queue, its picture under way; then one that was preempted comes before it."""
    media = MediaPlanner(make_config(encoder_blocks=BLOCKS, encoder_work=1, max_encoder_rows=8, encoder_cache_rows=8))
    waits, comes_back = (Request(pictured(name, Random(seed), 1), 32, 0) for name, seed in (("a", 2), ("b", 3)))
    media.begin(True)
    assert media.claim(waits, 0, 20) == 1 and media.keeps(waits)
    media.begin(True)
    media.next_is(waits)
    assert waits.held
    media.next_is(comes_back)
    assert not waits.held and not len(media.cache)
    assert media.claim(comes_back, 0, 20) == 1 and media.encodes[-1].first == 0
