"""The bench of decode attention's tiles: what it proposes fits and differs, and it measures every point once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon came with Triton 3.4")

from bench.ops import attention_tiles as bench
from bench.ops.attention_tiles import Shape
from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import EarlyTile, Heads, program_bytes
from headway.kernels.registry import Op
from tests.kernels.gluon_decode import modelled

SMALL = Shape(1, 3, 64)


@contextmanager
def without_a_card(times: Iterator[float]) -> Iterator[None]:
    """The kernel's model in place of the card; each call that is timed runs once and takes what ``times`` says."""

    def timed(calls: list[Any], least: int, replays: int, before: Any) -> float:
        before()
        for call in calls:
            call()
        return next(times)

    with (
        modelled(processors=4),
        patch.object(Op, "__call__", lambda self, *args: self.implementation("cuda")(*args)),
        patch.object(bench, "time_calls", timed),
        patch.object(bench, "COLD_BYTES", 1),
        patch.object(bench, "WARPS", (2, 4)),
        patch.object(bench, "STAGES", (1, 2)),
    ):
        yield


@pytest.mark.parametrize("shape", bench.SHAPES, ids=str)
def test_candidates_fit_and_differ(shape: Shape) -> None:
    for rows, tokens, _ in bench.points(bench.ROWS):
        found = bench.candidates(shape, rows, tokens, 132)
        assert len(found) >= 4
        launches = set()
        for tile in found:
            used, share = bench.splits_in_use(tile, shape, rows, tokens, 132)
            assert program_bytes(tile, shape.heads) <= 227 << 10 and bench.together(tile, shape) >= 1
            assert used * share * tile.block_n >= tokens > (used - 1) * share * tile.block_n
            assert tile.cluster == 1 or tile.cluster // 2 < used <= tile.cluster
            launches.add((tile.num_warps, tile.stages, used, tile.cluster, tile.registers))
        assert len(launches) == len(found)


def test_shared_memory_is_what_kernels_compile_to() -> None:
    """As Triton 3.6 says for sm_90."""
    few, narrow = Shape(2, 6, 128), Shape(1, 4, 256, 1)
    assert program_bytes(EarlyTile(2, 3), few.heads) == 60616
    assert program_bytes(EarlyTile(2, 2, cluster=4), few.heads) == 61152
    assert program_bytes(EarlyTile(4, 1), Heads(256, 4, 2)) == 87736
    assert program_bytes(EarlyTile(4, 2, cluster=2), narrow.heads) == 96080
    assert [bench.together(EarlyTile(2, stages), few) for stages in (1, 2, 3, 4)] == [6, 5, 3, 2]


def test_every_candidate_has_its_kernel() -> None:
    for shape in bench.SHAPES[:3]:
        kernels = {(k.num_warps, k.stages, k.cluster, k.registers) for k in bench.kernels_of(shape, bench.ROWS, 132)}
        for rows, tokens, _ in bench.points(bench.ROWS):
            tiles = bench.tiles_of(shape, rows, tokens, 132)
            assert tiles[0] == bench.own_tile(shape, rows, 132)
            assert {(tile.num_warps, tile.stages, tile.cluster, tile.registers) for tile in tiles} <= kernels
    assert len({str(shape) for shape in bench.SHAPES}) == len(bench.SHAPES)


def test_rows_are_ragged_and_longest_first() -> None:
    lengths = bench.lengths_of(65, 1000)
    assert (lengths[0], lengths[-1]) == (1200, 800) and abs(sum(lengths) - 65_000) < 65
    assert lengths == sorted(lengths, reverse=True) and bench.lengths_of(1, 300) == [300]
    assert (8, 4000, 0.2) in bench.points([8]) and (64, 430, 0.8) in bench.points([64]) and len(bench.points([1])) == 2


def test_a_point_has_every_candidate() -> None:
    times = iter(float(n) for n in range(1, 100))
    with without_a_card(times):
        point = bench.Bench(4, 1e3, time.monotonic() + 1e6, "cpu").measure(SMALL, 2, 24)
        tiles = bench.tiles_of(SMALL, 2, 24, 4)
    assert [EarlyTile(**{name: each[name] for name in EarlyTile.__slots__}) for each in point["tiles"]] == tiles
    assert [each["us"] for each in point["tiles"]] == [float(n) for n in range(1, len(tiles) + 1)]
    assert point["own_us"] == 1.0 and not point["cut"] and point["keys"] == sum(bench.lengths_of(2, 24))
    assert point["floor_us"] == point["keys"] * 2 * 64 * 2 / 1e3
    json.dumps(point)


def test_a_tile_that_is_wrong_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = EarlyTile(2, 1, 0.97)

    def attend(*arguments: Any) -> torch.Tensor:
        out: torch.Tensor = real(*arguments)
        return out + 1 if chosen() == wrong else out

    def chosen() -> EarlyTile:
        tile: EarlyTile = vars(early_decode)["early_tile"](2, Heads(64, 3, 2), 4)
        return tile

    real = decode_attention.implementation("cuda")
    with without_a_card(iter([1.0] * 100)), patch.object(Op, "__call__", lambda self, *args: attend(*args)):
        point = bench.Bench(4, 1e3, time.monotonic() + 1e6, "cpu").measure(SMALL, 2, 24)
        count = len(bench.tiles_of(SMALL, 2, 24, 4))
    assert len(point["tiles"]) == count - 1 and not point["cut"]
    assert str(wrong) in capsys.readouterr().out


def test_long_rows_are_cut_into_more_pieces() -> None:
    """Of lengths that are spread wide; the launcher gives rows of any length the pieces that it was told."""
    few = (patch.object(bench, name, (value,)) for name, value in (("WARPS", 2), ("STAGES", 1), ("RESIDENTS", 0.97)))
    with without_a_card(iter([1.0] * 20)), next(few), next(few), next(few):
        point = bench.Bench(4, 1e3, time.monotonic() + 1e6, "cpu").measure(SMALL, 4, 150, 0.8)
    pieces = {each["piece"]: each for each in point["tiles"] if each["num_warps"] == 2 and each["stages"] == 1}
    assert pieces.keys() == {0, 128, 256, 512}
    assert (pieces[128]["used"], pieces[256]["used"], pieces[512]["used"]) == (2, 1, 1)
    assert not bench.pieces_of(SMALL, 4, 0.2, [EarlyTile(2, 1)], 4)


def test_without_time_the_rule_alone_is_measured() -> None:
    with without_a_card(iter([1.0] * 100)):
        point = bench.Bench(4, 1e3, time.monotonic() - 1, "cpu").measure(SMALL, 2, 24)
    assert len(point["tiles"]) == 1 and point["cut"]
