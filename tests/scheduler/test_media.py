"""The encoder cache, and how far rows may go: by hand, and over random pictures."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from headway.core.config import SchedulerConfig
from headway.core.encode import EncoderItem, MediaRun
from headway.core.errors import HeadwayError, InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.scheduler.cache.encoder import EncoderCache
from headway.scheduler.media import MediaPlanner
from headway.scheduler.request import Request


def planner(**others: Any) -> MediaPlanner:
    options: dict[str, Any] = {"encoder_cache_rows": 20, "max_encoder_rows": 100, "longest_whole": 50} | others
    found = MediaPlanner(
        SchedulerConfig(
            max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=8, num_blocks=100, **options
        )
    )
    found.begin(False)
    return found


def request(runs: list[tuple[int, int, int]], length: int = 40, keys: str = "abcdef") -> Request:
    """Runs are (item, start, end); items are whole."""
    rows: dict[int, int] = {}
    told = []
    for item, start, end in runs:
        told.append(MediaRun(item=item, first=rows.get(item, 0), start=start, end=end))
        rows[item] = rows.get(item, 0) + end - start
    items = [EncoderItem(kind="image", key=keys[i].encode(), rows=rows[i], first=0) for i in sorted(rows)]
    message = AddRequest(
        request_id="r", prompt_token_ids=[1] * length, params=SamplingParams(max_tokens=4), seed=0, eos_token_ids=[],
        media=items, runs=told,
    )  # fmt: skip
    return Request(message, 64, 0)


def test_ranges_are_reused_the_oldest_first() -> None:
    cache = EncoderCache(10)
    a, b = cache.take("a", 4), cache.take("b", 4)
    assert a is not None and b is not None and (a.start, b.start) == (0, 4)
    assert cache.take("c", 4) is None, "both are held"
    cache.release("a")
    cache.release("b")
    assert cache.hold("a") is a
    cache.release("a")
    c = cache.take("c", 4)
    assert c is not None and c.start == 4 and "b" not in cache and "a" in cache
    with pytest.raises(HeadwayError, match="more often"):
        cache.release("a")
    cache.check(1)


def test_random_ranges_never_overlap() -> None:
    rng, cache, held = random.Random(1), EncoderCache(64), list[str]()
    for _ in range(3000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            name = str(rng.randrange(30))
            if cache.hold(name) or cache.take(name, 1 + int(name) % 17):
                held.append(name)
        cache.check(len(held))


@pytest.mark.parametrize("seed", range(4))
def test_room_is_found_wherever_there_is_some(seed: int) -> None:
    """An item gets the first gap that is long enough, to the row; where there is none the idle ones go, those used longest ago
    first and no more than it takes."""
    rng, cache, held = random.Random(seed), EncoderCache(24), list[str]()
    order, ranges = list[str](), dict[str, range]()  # by last use; rows

    def gap(rows: int) -> int | None:
        taken = {row for each in ranges.values() for row in each}
        return next((s for s in range(25 - rows) if not taken & set(range(s, s + rows))), None)

    for _ in range(1500):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
            continue
        name = str(rng.randrange(20))
        rows = 1 + int(name) % 9
        if name in ranges:
            assert cache.hold(name) is not None
            order.append(order.pop(order.index(name)))
        else:
            idle = [each for each in order if each not in held]
            while gap(rows) is None and idle:
                order.remove(idle[0])
                del ranges[idle.pop(0)]
            start, found = gap(rows), cache.take(name, rows)
            assert (None if found is None else found.start) == start
            if start is None:
                continue
            order.append(name)
            ranges[name] = range(start, start + rows)
        held.append(name)
        assert all((name in cache) == (name in ranges) for name in map(str, range(20)))


def test_a_row_ends_before_a_picture_that_must_wait() -> None:
    media = planner(max_encoder_rows=8)
    asked = request([(0, 2, 10), (1, 12, 20)])
    assert media.claim(asked, 0, 30) == 12, "a step encodes eight rows"
    assert [job.item.key for job in media.encodes] == [b"a"]
    media.passed(asked, 12)
    media.begin(False)
    assert media.claim(asked, 12, 40) == 40 and [job.item.key for job in media.encodes] == [b"b"]
    media.release(asked)
    media.cache.check(0)


@pytest.mark.parametrize("salts", [(None, None), ("x", "x"), (None, "x"), ("x", "y"), ("", None)])
def test_only_equal_salts_share_a_picture(salts: tuple[str | None, str | None]) -> None:
    """Who asks after somebody else learns nothing from how long his own takes."""
    media, encoded = planner(), []
    for salt in salts:
        one = request([(0, 5, 9)])
        one.message.cache_salt = salt
        assert media.claim(one, 0, 40) == 40
        encoded += [job.name for job in media.encodes]
        media.passed(one, 40)
        media.begin(False)
    assert len(encoded) == len(set(encoded)) == len(set(salts))


def test_rows_are_not_given_away_in_the_step_that_reads_them() -> None:
    media = planner(encoder_cache_rows=8)
    asked = request([(0, 2, 10), (1, 12, 20)])
    assert media.claim(asked, 0, 30) == 12
    media.passed(asked, 12)
    other = request([(0, 0, 8)], keys="x")
    assert media.claim(other, 0, 30) == 0, "the step's encoders run ahead of its rows"
    media.begin(False)
    assert media.claim(other, 0, 30) == 30


def test_tokens_that_see_each_other_stay_together() -> None:
    media = planner(sees="spans")
    asked = request([(0, 4, 12)])
    assert [media.claim(asked, 0, end) for end in (3, 4, 5, 11, 12, 13)] == [3, 4, 4, 4, 12, 13]
    assert media.claim(asked, 4, 11) == 4 and media.claim(asked, 4, 12) == 12
    whole = planner(sees="prompt")
    assert whole.claim(asked, 0, 39) == 0 and whole.claim(request([(0, 4, 12)]), 0, 40) == 40
    assert whole.claim(request([(0, 4, 12)]), 16, 40) == 40, "behind a prefix that was found"


def test_beside_rows_that_decode_less_is_encoded() -> None:
    media = planner(max_encoder_rows=16)
    media.begin(True)
    assert media.claim(request([(0, 0, 4), (1, 5, 9)]), 0, 30) == 5
    media.begin(False)
    assert media.claim(request([(0, 0, 4), (1, 5, 9)], keys="xy"), 0, 30) == 30


def test_beside_rows_that_decode_a_row_with_pictures_is_short() -> None:
    """Text is not cut for that, and tokens that see each other go whole."""
    for sees, ends in (("", [6, 8, 14, 40]), ("spans", [4, 12, 14, 40])):
        media = planner(media_tokens=4, sees=sees)
        media.begin(True)
        asked = request([(0, 4, 12)])
        assert [media.claim(asked, *row) for row in ((2, 30), (4, 30), (10, 30), (12, 40))] == ends
        media.begin(False)
        assert media.claim(asked, 2, 30) == 30


@pytest.mark.parametrize(
    ("runs", "rows", "message"),
    [
        ([(0, 2, 10)], {0: 7}, "7 features and 8"),
        ([(0, 2, 10)], {0: 9}, "9 features and 8"),
        ([(0, 2, 10), (1, 9, 12)], {}, "overlap"),
        ([(0, 38, 42)], {}, "outside"),
        ([(0, 0, 30)], {}, "cache has 20 rows"),
    ],
)
def test_what_does_not_fit_is_refused(runs: list[tuple[int, int, int]], rows: dict[int, int], message: str) -> None:
    asked = request(runs).message
    asked.media = [
        EncoderItem(kind="image", key=each.key, rows=rows.get(i, each.rows), first=0)
        for i, each in enumerate(asked.media)
    ]
    with pytest.raises(InvalidRequestError, match=message):
        planner().check(asked)
    with pytest.raises(InvalidRequestError, match="see each other"):
        planner(sees="prompt", longest_whole=30).check(request([(0, 1, 4)]).message)


@pytest.mark.parametrize("sees", ["", "spans"])
@pytest.mark.parametrize("seed", range(6))
def test_what_rows_read_and_hold_token_by_token(seed: int, sees: str) -> None:
    """Random pictures, some of several runs: every row there can be, by what each of its tokens stands for."""
    rng, media = random.Random(seed), planner(encoder_cache_rows=400, sees=sees)
    place, runs = rng.randrange(3), list[tuple[int, int, int]]()
    for item in range(rng.randrange(1, 5)):
        for _ in range(rng.choice([1, 1, 2])):
            length = rng.randrange(1, 5)
            runs.append((item, place, place + length))
            place += length + rng.randrange(3)
    one = request(runs, length=40)
    of = {position: number for number, (_, start, end) in enumerate(runs) for position in range(start, end)}
    assert media.claim(one, 0, 40) == 40 and {*one.held} == {item for item, _, _ in runs}
    first = {item: one.held[item].start for item in one.held}
    for start in range(40):
        for end in range(start + 1, 41):
            read = sorted({of[position] for position in range(start, end) if position in of})
            wanted = [(number, first[runs[number][0]] + one.message.runs[number].first) for number in read]
            assert media.rows_of(one, start, end) == wanted, (start, end)
            assert media.touches(one, start, end) == bool(read)
            went = media.claim(one, start, end)
            inside = sees and end in of and of[end] == of.get(end - 1)
            assert went == (max(start, runs[of[end]][1]) if inside else end), "tokens that see each other stay together"
    for end in sorted(rng.sample(range(1, 41), k=6)):
        media.passed(one, end)
        left = {item for item, _, past in runs if past > end}
        assert {*one.held} == left, "what lies behind is given back"
        if end < 40:
            media.claim(one, end, 40)
            assert {*one.held} == left, "and is not taken again"
    media.release(one)
    assert not one.held


def test_what_names_blocks_differs_where_what_they_mean_does() -> None:
    """Of two requests with the same tokens the marks are equal exactly where picture, part and time are."""
    marks, media = list[Any](), planner()
    for keys, late, split in (("ab", -1, False), ("ab", -1, True), ("ba", -1, False), ("ab", 3, False)):
        one = request([(0, 2, 6), (0, 6, 8)] if split else [(0, 2, 8)], keys=keys)
        for run in one.message.runs:
            run_late = msgspec.structs.replace(run, late=late)
            one.message.runs[one.message.runs.index(run)] = run_late
        found = media.marks(one.message)
        assert [(start, end) for start, end, _ in found] == [(run.start, run.end) for run in one.message.runs]
        marks.append(tuple(name for _, _, name in found))
    assert len({*marks}) == 4
    assert media.marks(request([(0, 2, 8)]).message) == media.marks(request([(0, 2, 8)]).message)
