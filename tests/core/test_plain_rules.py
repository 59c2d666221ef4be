"""The small rules that everybody builds on, each against what its words say: counted out, not computed the same way again."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from headway.core.chunks import CHUNK, chunk_table, most_chunks
from headway.core.encode import BlockCost, EncodeJob, EncoderItem, most_words, pack_jobs
from headway.core.hearing import AlignedRow, HearingInfo, SpeechRules
from headway.core.histogram import Histogram
from headway.core.ints import cdiv, mix64, next_power_of_2, round_up
from headway.core.latents import SHORT_ROW, SMALL_STEP, SMALL_STEP_ROWS, absorbs_all, short_row
from headway.core.media import Grid


def test_rounding() -> None:
    for a in range(70):
        for b in range(1, 17):
            assert cdiv(a, b) == next(n for n in range(80) if n * b >= a)
            assert round_up(a, b) == next(n for n in range(90) if n >= a and n % b == 0)
    for n in range(1, 300):
        assert next_power_of_2(n) == next(power for power in (2**k for k in range(10)) if power >= n)


def test_mixing() -> None:
    """Neighbours share no bits, a seed beyond 64 bits is cut, and what a seed gives is the same in every version."""
    assert mix64(9, 4) == 0x1FC74596A4F12CB
    seen = {mix64(seed, number) for seed in range(40) for number in range(40)}
    assert len(seen) == 1600 and all(0 <= each < 2**64 for each in seen)
    assert mix64(5, 7) == mix64(5 + 2**64, 7) == mix64(5 - 2**64, 7) != mix64(7, 5)
    flips = [bin(mix64(9, 4) ^ mix64(9 ^ 1 << bit, 4)).count("1") for bit in range(64)]
    flips += [bin(mix64(9, 4) ^ mix64(9, 4 ^ 1 << bit)).count("1") for bit in range(63)]
    assert min(flips) > 12 and 28 < sum(flips) / len(flips) < 36


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_rows(seed: int) -> None:
    rng = random.Random(seed)
    short = rng.choice([1, 1, 4])
    lengths = [rng.choice([1, 2, 4, 5, 63, 64, 65, 128, 129, 200]) for _ in range(rng.randrange(1, 9))]
    wanted: list[int] = []
    for row, length in enumerate(lengths):
        begin, nth = 0, 0
        while length > short and begin < length:
            wanted += [row, nth]
            begin, nth = begin + CHUNK, nth + 1
    table = chunk_table(np.array(lengths, np.int32), short)
    assert table.dtype == np.int32 and table.tolist() == wanted
    bound = most_chunks(sum(lengths), len(lengths), max(lengths), short)
    assert len(wanted) // 2 <= bound <= sum(lengths)
    assert bound <= sum(lengths) // CHUNK + len(lengths) and (bound > 0) == (max(lengths) > short)


def test_which_rows_attend_to_latents() -> None:
    assert (short_row(1), short_row(SHORT_ROW), short_row(SHORT_ROW + 1)) == (SHORT_ROW, SHORT_ROW, SHORT_ROW + 1)
    for tokens, rows, longest, width, all_of_them in (
        (SMALL_STEP, SMALL_STEP_ROWS, SMALL_STEP, 1, True),
        (SMALL_STEP + 1, SMALL_STEP_ROWS, SMALL_STEP, 1, False),
        (SMALL_STEP, SMALL_STEP_ROWS + 1, SMALL_STEP, 1, False),
        (9999, 999, SHORT_ROW, 1, True),
        (9999, 999, SHORT_ROW + 1, 1, False),
        (9999, 999, SHORT_ROW + 1, SHORT_ROW + 1, True),
    ):
        assert absorbs_all(tokens, rows, longest, width) is all_of_them


def item(rows: int, words: int, **fields: object) -> EncoderItem:
    data = np.arange(100 * rows, 100 * rows + words, dtype=np.int32).tobytes()
    return EncoderItem(kind="image", key=b"k", rows=rows, sizes=(rows, 2), data=data, **fields)  # type: ignore[arg-type]


def test_what_a_block_of_an_encoder_costs() -> None:
    seen = item(1, 0, units=6, reach=(5, 3))
    assert BlockCost(10, 2).of(seen) == 6 * (10 + 2 * 5) and BlockCost(10, 2, windowed=True).of(seen) == 6 * (
        10 + 2 * 3
    )
    assert Grid(2, 3, 5).patches == 30 and item(1, 7).num_words == 7


@pytest.mark.parametrize("seed", range(10))
def test_jobs_are_found_again_in_their_buffer(seed: int) -> None:
    """The input comes with the first blocks, the places with the last; everything begins at multiples of 16 bytes."""
    rng, jobs = random.Random(seed), list[EncodeJob]()
    for number in range(rng.randrange(1, 5)):
        rows = rng.randrange(1, 7)
        places = np.arange(rows, dtype=np.int32) + 1000 * number
        first, is_last = rng.choice([0, 3]), rng.random() < 0.5
        jobs.append(EncodeJob(number, item(rows, rng.randrange(1, 9) * rows), places, None, first, 5, is_last))
    found, buffer = pack_jobs(jobs)
    assert buffer.dtype == np.int32 and len(buffer) % 4 == 0
    starts = [sum(job.item.rows for job in jobs[:number]) for number in range(len(jobs) + 1)]
    assert buffer[: len(jobs) + 1].tolist() == starts
    spans = [(0, len(jobs) + 1)]
    for job, each in zip(jobs, found, strict=True):
        assert (each.rows, each.sizes, each.first, each.end) == (job.item.rows, job.item.sizes, job.first, job.end)
        assert each.is_last is job.is_last and each.data_at % 4 == each.places_at % 4 == 0
        data = np.frombuffer(job.item.data, np.int32) if not job.first else np.empty(0, np.int32)
        assert buffer[each.data_at : each.data_at + each.num_words].tolist() == data.tolist()
        places = job.places if job.is_last else job.places[:0]
        assert buffer[each.places_at : each.places_at + len(places)].tolist() == places.tolist()
        spans += [(each.data_at, each.data_at + each.num_words), (each.places_at, each.places_at + len(places))]
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    begun = [job.item for job in jobs if not job.first]
    per_row = max((each.num_words // each.rows for each in begun), default=0)
    assert len(buffer) <= most_words(sum(job.item.rows for job in jobs), per_row, len(jobs))


def test_rules_of_a_transcript() -> None:
    hearing = HearingInfo(
        mel_bins=8, frames=300, outputs=9, start=7, end=50, no_timestamps=40, first_timestamp=60, suppress=[41, 3],
        begin_suppress=[5], max_initial=2,
    )  # fmt: skip
    plain = SpeechRules(suppress=[3, 41], begin_suppress=[5], first_timestamp=-1, end=50, max_initial=-1)
    timed = SpeechRules(suppress=[3, 40, 41], begin_suppress=[5], first_timestamp=60, end=50, max_initial=2)
    assert hearing.rules(timestamps=False) == plain and hearing.rules(timestamps=True) == timed
    assert hearing.window_seconds == 3.0
    assert AlignedRow(slot=1, begin=10, end=30, first=4, frames=9).num_placed == len(range(10 + 4 + 1, 30))


def test_a_histogram() -> None:
    """Bounds are inclusive, what is above the last has a bucket of its own, and a copy stays as it was."""
    made = Histogram.over([1.0, 2.0, 5.0])
    for value in (0.5, 1.0, 1.5, 2.0, 5.0, 5.5, 100.0):
        made.observe(value)
    assert made.counts == [2, 2, 1, 2] and made.count == 7 and made.total == 115.5
    before = made.copy()
    made.observe(1.0)
    assert (before.counts, before.count, before.total, before.bounds) == ([2, 2, 1, 2], 7, 115.5, (1.0, 2.0, 5.0))
