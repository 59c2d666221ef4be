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
from headway.core.errors import ConfigError, UnsupportedModelError
from headway.parallel import wire
from headway.parallel.dp import IDLE, Agreement, Letter, Want, Watchdog, agreed
from headway.parallel.group import RankError
from headway.parallel.mesh import Mesh, share, stage_starts
from headway.parallel.shard import EvenShard, ExpertShard, HeadShard, Part, VocabularyPart

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
    for group in ranks(size) if size > 1 else ():
        with pytest.raises(UnsupportedModelError, match=f"tensor_parallel_size={size} .* {size - 1} wide"):
            Part(group, size - 1)
    for group in ranks(size):
        assert EvenShard(group).columns(5) == (5 * group.rank, 5 * group.rank + 5, 5 * size)
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


# -- heads ---------------------------------------------------------------------------------------------------------------

HEADS = [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (12, 4, 2), (12, 2, 6), (6, 3, 1)]
D = 3


def by_head(matrix: torch.Tensor, heads: range | list[int], size: int = D) -> torch.Tensor:
    """Rows of these heads."""
    return torch.cat([matrix[head * size : (head + 1) * size] for head in heads])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_rows_of_projections_are_those_of_the_ranks_heads(heads: int, kv_heads: int, size: int, gated: bool) -> None:
    """In three tensors or in one; with gates behind each head's query, without values of their own, or queries alone."""
    wide = 2 * D if gated else D
    whole = [torch.rand(heads * wide), torch.rand(kv_heads * D), torch.rand(kv_heads * D)]
    for group in ranks(size):
        shard = HeadShard(group, heads, kv_heads)
        for sections in (3, 2, 1):
            own = [by_head(whole[0], shard.heads, wide), *(by_head(each, shard.kv_heads) for each in whole[1:])][
                :sections
            ]
            apart = shard.taken(["q", "k", "v"][:sections], D, gated=gated, sections=sections)
            if sections > 1:
                for (rows, number), part, mine in zip(apart.values(), whole, own, strict=False):
                    assert number == len(part) and torch.equal(part[rows], mine)
            joined = torch.cat(whole[:sections])
            rows, number = shard.taken(["qkv"], D, gated=gated, sections=sections)["qkv"]
            assert number == len(joined) and torch.equal(joined[rows], torch.cat(own))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_rows_of_a_tensor_by_key_heads(heads: int, kv_heads: int, size: int) -> None:
    """Each key head has its queries, its key and its value side by side."""
    each = heads // kv_heads
    q, k, v = torch.rand(heads * D), torch.rand(kv_heads * D), torch.rand(kv_heads * D)
    parts = [
        torch.cat([by_head(q, range(n * each, (n + 1) * each)), by_head(k, [n]), by_head(v, [n])])
        for n in range(kv_heads)
    ]
    joined = torch.cat(parts)
    for group in ranks(size):
        shard = HeadShard(group, heads, kv_heads)
        rows, number = shard.taken_by_head("qkv", D)["qkv"]
        own = torch.cat([by_head(q, shard.heads), by_head(k, shard.kv_heads), by_head(v, shard.kv_heads)])
        assert number == len(joined) and torch.equal(joined[rows], own)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_rows_of_norms_and_columns_of_the_product_out(heads: int, kv_heads: int, size: int) -> None:
    whole = torch.arange(heads * D)
    for group in ranks(size):
        shard = HeadShard(group, heads, kv_heads)
        assert [whole[slice(*shard.columns(D)[:2])].tolist(), shard.columns(D)[2]] == [
            by_head(whole, shard.heads).tolist(), heads * D,
        ]  # fmt: skip
        cases = (
            (shard.head_rows(D), shard.heads, heads * D), (shard.norm_rows(D, queries=True), shard.heads, heads * D),
            (shard.norm_rows(D, queries=False), shard.kv_heads, kv_heads * D),
        )  # fmt: skip
        for (rows, number), own, all_of_them in cases:
            assert number == all_of_them and rows.tolist() == by_head(whole, own).tolist()
        assert shard.head_rows()[0].tolist() == list(shard.heads)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_norms_over_all_heads_are_made_of_parts(heads: int, kv_heads: int, size: int) -> None:
    """Keys that several ranks have count once."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(5, n * D, generator=generator) for n in (heads, kv_heads))
    q_weight, k_weight = (torch.rand(n * D, generator=generator) for n in (heads, kv_heads))
    squares: list[torch.Tensor] = []
    shards = [HeadShard(group, heads, kv_heads) for group in ranks(size)]

    def normalised(shard: HeadShard) -> tuple[torch.Tensor, torch.Tensor]:
        return shard.normalised(
            by_head(q.T, shard.heads).T, by_head(k.T, shard.kv_heads).T, by_head(q_weight, shard.heads),
            by_head(k_weight, shard.kv_heads), 1e-5,
        )  # fmt: skip

    def listen(x: torch.Tensor) -> torch.Tensor:
        squares.append(x.clone())
        return x

    for shard in shards:  # what each rank has to say
        setattr(shard.group, "all_reduce", listen)  # noqa: B010 - a group of no kind
        normalised(shard)
    total = torch.stack(squares).sum(0)
    for shard in shards:
        setattr(shard.group, "all_reduce", lambda x: total)  # noqa: B010 - as above
        found = normalised(shard)
        for x, weight, own, part in ((q, q_weight, shard.heads, found[0]), (k, k_weight, shard.kv_heads, found[1])):
            wanted = torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-5)
            torch.testing.assert_close(part, by_head(wanted.T, own).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 3), (6, 4, 3), (12, 4, 6), (9, 3, 2)])
def test_heads_that_cannot_be_dealt_out(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"tensor_parallel_size={size} cannot deal out {heads} heads with {kv_heads}"
    ):
        HeadShard(ranks(size)[0], heads, kv_heads)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_experts_are_whole_on_one_rank_or_in_parts_on_all(size: int, replicas: int, whole: bool) -> None:
    shards = [ExpertShard(group, 7, 12, whole, peer) for peer in ranks(replicas) for group in ranks(size)]
    owned = [expert for shard in shards for expert in shard.experts]
    assert owned == list(range(7)) * (1 if whole else size * replicas)
    for shard in shards:
        assert (shard.part is None) == whole
        if shard.part is not None:
            assert (shard.part.whole, shard.part.group) == (12, shard.group)


# -- places --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3), (2, 3), (3, 2)])
def test_every_rank_has_a_place_of_its_own(tensor: int, pipeline: int) -> None:
    """The last stage is that of rank 0, which leads."""
    places = [Mesh(tensor, pipeline).at(rank) for rank in range(tensor * pipeline)]
    assert places[0].size == tensor * pipeline and places[0].is_last and places[0].tensor_rank == 0
    assert [(place.stage, place.tensor_rank) for place in places] == [
        (stage, part) for stage in reversed(range(pipeline)) for part in range(tensor)
    ]
    assert all(place.is_last == (place.stage == pipeline - 1) for place in places)
    for layers in range(pipeline, 3 * pipeline + 2):
        owned = sorted({(place.stage, *place.layers(layers)) for place in places})
        assert [layer for _, *own in owned for layer in own] == list(range(layers)), "in the order of the stages"
        counts = [len(own) for _, *own in owned]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
        assert stage_starts(layers, pipeline) == [own[0] for _, *own in owned]
    with pytest.raises(
        ConfigError, match=f"pipeline_parallel_size={pipeline} is more than the model's {pipeline - 1} layers"
    ):
        places[0].layers(pipeline - 1)


@pytest.mark.parametrize(
    ("layers", "stages", "barred", "starts"),
    [
        (6, 2, (), [0, 3]), (6, 2, (3,), [0, 2]), (6, 2, (2, 3, 4), [0, 1]), (35, 2, range(19, 35), [0, 18]),
        (35, 2, range(17, 35), [0, 16]), (9, 3, (3,), [0, 2, 5]), (9, 3, (3, 6), [0, 2, 5]), (5, 2, (1, 3), [0, 2]),
        (4, 2, (1, 2, 3), [0, 2]), (5, 3, (1, 2, 3), [0, 2, 4]),
    ],
)  # fmt: skip
def test_no_stage_begins_with_a_barred_layer(layers: int, stages: int, barred: Any, starts: list[int]) -> None:
    """The longest is as short as can be; where all ways are barred, which is refused elsewhere, none counts."""
    assert stage_starts(layers, stages, barred) == starts


def test_names_tell_what_there_are_several_of() -> None:
    assert Mesh(replica=1, replicas=2).name == "rank 0 (replica 1)"
    assert Mesh(2, 1, 1, 1, 3).name == "rank 1 (replica 1, part 1)"
    assert Mesh(1, 2, 1).name == "rank 1 (stage 0)"


def test_things_are_dealt_out_to_neighbours() -> None:
    for size in range(1, 6):
        for total in range(12):
            parts = [share(total, rank, size) for rank in range(size)]
            assert [each for part in parts for each in part] == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
