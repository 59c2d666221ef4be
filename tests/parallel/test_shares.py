"""What ranks have of something whole, for every size of it and every number of ranks; what replicas agree on, field by field;
how patient they are; and messages at the largest size."""

from __future__ import annotations

import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.parallel import wire
from headway.parallel.dp import IDLE, Agreement, Letter, Want, Watchdog, agreed
from headway.parallel.group import RankError
from headway.parallel.shard import EvenShard, HeadShard, Part, VocabularyPart

SIZES = (4, 8, 16, 32)


def ranks(size: int) -> list[Any]:
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("size", range(1, 9))
def test_every_token_of_a_vocabulary_is_one_ranks(size: int) -> None:
    for whole in range(1, 41):
        parts = [VocabularyPart(group, whole) for group in ranks(size)]
        taken = torch.cat([part.taken[0] for part in parts])
        assert taken.tolist() == list(range(whole)) and {part.taken[1] for part in parts} == {whole}
        for part in parts:
            assert 0 <= part.own <= part.rows and 0 <= part.first <= whole and part.rows * size >= whole


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_inner_widths_and_channels_are_dealt_out_once(size: int) -> None:
    for whole in (size, 2 * size, 12 * size):
        for products, names in ((1, ("up",)), (2, ("gate", "up")), (2, ("both",))):
            found: dict[str, list[int]] = {name: [] for name in names}
            for group in ranks(size):
                part = Part(group, whole)
                for name, (rows, number) in part.taken(names, products).items():
                    found[name] += rows.tolist()
                    assert number == products // len(names) * whole
                first, end, all_of_them = part.columns()
                assert (end - first, all_of_them) == (len(part.own), whole)
            assert all(sorted(rows) == list(range(products // len(names) * whole)) for rows in found.values())
    for sections, shared in (((3,), 0), ((3, 5), 0), ((4, 2, 2), 7)):
        taken = [EvenShard(group).rows(*sections, whole=shared) for group in ranks(size)]
        assert {number for _, number in taken} == {size * sum(sections) + shared}
        owned = [row for each, _ in taken for row in each.tolist() if row < size * sum(sections)]
        assert sorted(owned) == list(range(size * sum(sections)))
        behind = [[row for row in each.tolist() if row >= size * sum(sections)] for each, _ in taken]
        assert behind == [list(range(size * sum(sections), size * sum(sections) + shared))] * size


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (12, 4, 2), (12, 2, 6)]
)
def test_each_rank_has_the_keys_that_its_queries_read(heads: int, kv_heads: int, size: int) -> None:
    shards = [HeadShard(group, heads, kv_heads) for group in ranks(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(heads))
    for shard in shards:
        assert {head // (heads // kv_heads) for head in shard.heads} == {*shard.kv_heads}
        assert shard.copies == max(1, size // kv_heads)


# -- agreement ---------------------------------------------------------------------------------------------------------


def test_a_step_holds_what_each_replica_wants_of_it() -> None:
    rng = random.Random(3)

    def fitting(number: int) -> int:
        return next((size for size in SIZES if size >= number), SIZES[-1])

    for _ in range(400):
        wants = []
        for _ in range(rng.randrange(1, 5)):
            numbers = rng.randrange(1, 40), rng.randrange(1, 9), rng.randrange(1, 4)
            wants.append(rng.choice([IDLE, Want(*numbers, rng.random() < 0.5, rng.random() < 0.5)]))
        found = agreed(wants, SIZES)
        most, rows = max(max(want.tokens, want.rows) for want in wants), max(want.rows for want in wants)
        assert (found.tokens, found.rows, found.width) == (
            fitting(most),
            fitting(rows),
            max(want.width for want in wants),
        )
        assert found.only_decode == (not any(not want.only_decode for want in wants))
        assert found.halves == (not any(not want.halves for want in wants))
        assert found.check != found._replace(halves=not found.halves).check != found._replace(width=9).check


def test_letters_hold_every_field() -> None:
    rng = random.Random(1)
    for _ in range(100):
        want = Want(
            rng.randrange(2**20), rng.randrange(2**10), rng.randrange(2**8), *(rng.random() < 0.5 for _ in range(2))
        )
        letter = Letter(
            rng.randrange(99),
            rng.randrange(2**31),
            rng.randrange(2**31),
            want,
            rng.randrange(2**31),
            rng.random() < 0.5,
        )
        assert Letter.decode(letter.encode()) == letter and len(letter.encode()) == 32


class Nowhere:
    def send(self, letter: Letter) -> None: ...


@pytest.mark.parametrize("seed", range(5))
def test_patience_ends_when_somebody_was_missing_for_all_of_it(seed: int) -> None:
    """Looks at random moments, of a replica whose peer is late now and then. Only waiting that has gone on counts: not the time
    before the peer fell silent, nor that after it has spoken, though nobody looked then."""
    rng, now, since, ended = random.Random(seed), 0.0, None, 0
    ours = Agreement(0, 2, Nowhere(), depth=1, sizes=SIZES)
    dog = Watchdog(ours, 10.0)
    ours.wake()
    for _ in range(300):
        now += rng.choice([0.5, 3.0, 30.0])
        known = ours.begin(Want(1, 1))
        missing = bool(ours.missing)
        since = now if since is None or not missing else since
        if missing and now - since > 10.0:
            with pytest.raises(RankError, match="rank 1 said nothing of step"):
                dog.look(now)
            ended += 1
        else:
            dog.look(now)
        if known and rng.random() < 0.5:
            ours.next()
            since = None
        elif not known and rng.random() < 0.5:
            ours.take(Letter(1, 1, ours.step, Want(1, 1)))
    assert ended


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_frame_of_the_largest_size(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGEST", 1000)
    left, right = socket.socketpair()
    one, other = wire.Link(left, "one"), wire.Link(right, "other")
    try:
        data = bytes(i % 251 for i in range(1000 + more))
        one.send(7, data)
        if more > 0:
            with pytest.raises(RankError, match="which is none of ours"):
                other.receive(5.0)
        else:
            assert other.receive(5.0) == (7, data)
            one.send(8)
            assert other.receive(5.0) == (8, b"")
    finally:
        one.close()
        other.close()


def test_the_usual_arguments_name_no_other_ranks() -> None:
    args = EngineArgs(model="nowhere")
    assert (args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size) == (1, 1, 1)
