"""Wide rows of ``sample``: the launches that share them draw what the reference draws, whoever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.kernels.sample import TWICE, WIDE_K, may_be_wide, sample, tiles, triton
from headway.kernels.sample.reference import _threshold
from headway.kernels.sample.tiles import FILTERED, splits_for
from headway.kernels.sample.triton import sample_with
from headway.kernels.sample.triton_wide import BOUND, NOT_WIDE, STAGE, TO_RACE
from headway.kernels.testing import interpreter_loops
from tests.kernels import penalty_tables
from tests.kernels.guarded import floats, ints
from tests.kernels.penalty_tables import OFF

TILE = replace(FILTERED, gather=512, small=32, large=256, segment=512)
"""Small sizes, so that rows of few logits take every path."""

WIDE = [
    (0, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.999, 0.0),
    (0, 0.95, 0.01),
    (0, 1.0, 0.001),
    (1100, 1.0, 0.0),
    (1300, 0.9, 0.001),
]
"""(top_k, top_p, min_p) of rows that are wide when flat."""

NARROW = [(50, 0.9, 0.0), (3, 1.0, 0.0), (0, 1.0, 0.0)]


def _arguments(
    logits: torch.Tensor,
    filters: list[tuple[int, float, float]],
    seed: int = 0,
    penalties: tuple[float, float, float] = OFF,
) -> list[torch.Tensor]:
    """Row n is slot n + 1's: what is taken of a row's number in place of its slot's is another row's."""
    rows, each = len(filters), [filters[-1], *filters]
    slots = range(len(each))
    top_k, top_p, min_p = (list(column) for column in zip(*each, strict=True))
    tables = [ints(range(1, rows + 1)), floats([1.0 + 0.5 * (slot % 2) for slot in slots])]
    seeds = ints([[seed + slot, slot] for slot in slots])
    drawn_from = [ints(top_k), floats(top_p), floats(min_p), seeds, ints(slots)]
    return [logits, *tables, *drawn_from, *penalty_tables.tables([penalties] * len(each), logits.shape[1])]


def _draw(arguments: list[torch.Tensor], device: str, flags: int = 63, tile: tiles.SampleTile = TILE) -> torch.Tensor:
    with interpreter_loops():
        given: list[Any] = [argument.to(device) for argument in arguments]
        drawn = sample_with(tile, *given, flags)  # type: ignore[call-arg]
        return drawn.cpu()


def _kept(arguments: list[torch.Tensor], device: str, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """bool [V] per row: what the kernels' bound keeps; None of a row that is not wide."""
    finish, seen = triton._draw_wide, list[torch.Tensor]()

    def spied(*given: Any) -> None:
        finish(*given)
        seen.append(given[6])

    with monkeypatch.context() as patch:
        patch.setattr(triton, "_draw_wide", spied)
        _draw(arguments, device)
    records = seen[0].cpu()
    x = arguments[0] / arguments[2][1:, None] + 0.0
    bits = x.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    for stage in records[:, STAGE.value].tolist():
        assert stage in (NOT_WIDE.value, TO_RACE.value)
    wide = records[:, STAGE.value] == TO_RACE.value
    return [keys[row] >= records[row, BOUND.value] if wide[row] else None for row in range(len(x))]


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_bounds_are_exact(spread: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens kept are the reference's, but for one whose mass is within rounding of the target."""
    torch.manual_seed(int(spread * 100) + 1)
    filters = [*WIDE, (1300, 1.0, 0.7), (1300, 0.95, 0.6), *NARROW]  # min_p keeps fewer than the top_k of some
    arguments = _arguments(torch.randn(len(filters), 1500) * spread, filters)
    logits, _, heat, *columns = arguments
    x = logits / heat[1:, None]
    bounds = _threshold(x, *(column[1:, None] for column in columns[:3]))
    found = 0
    for row, kept in enumerate(_kept(arguments, device, monkeypatch)):
        if kept is not None:
            found += 1
            assert int((kept != (x[row] >= bounds[row])).sum()) <= (filters[row][1] < 1.0), filters[row]
        else:
            assert row >= len(filters) - 3 or spread == 1.0
    assert found >= (9 if spread < 1.0 else 5)


@pytest.mark.parametrize("penalties", [OFF, (1.1, 0.0, 0.02)])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 8.0])
def test_wide_rows_draw_as_the_reference(spread: float, penalties: tuple[float, float, float], device: str) -> None:
    torch.manual_seed(int(spread * 100))
    filters = WIDE + NARROW
    logits = torch.randn(len(filters), 1500) * spread
    logits[:, 100::7] = logits[:, 101::7][:, : logits[:, 100::7].shape[1]].round(decimals=1)  # ties
    arguments = _arguments(logits, filters, penalties=penalties)
    differing = _draw(arguments, device) != sample.reference(*arguments, 63)
    assert int(differing.sum()) <= (spread == 1.0)  # a mass within rounding of the target


@pytest.mark.parametrize("case", ["clusters", "offset", "forbidden", "infinite", "one level", "sorted"])
def test_hard_rows(case: str, device: str) -> None:
    """Rows whose bracket is not narrowed as hoped, whose candidates are too many, or whose weights are special."""
    torch.manual_seed(3)
    logits, tile = torch.randn(len(WIDE), 1500) * 0.1, TILE
    if case == "clusters":
        logits += torch.arange(1500) % 2 * 30.0  # between the two halves nothing
    elif case == "offset":
        logits += 20.0
    elif case == "forbidden":
        logits[:, torch.arange(1500) % 3 != 2] = -torch.inf
        logits[5:, 1::2] = 0.5 * torch.randn(2, 750)  # enough for the wide top_k
    elif case == "infinite":
        logits[:, 7::2] = torch.inf
    elif case == "one level":
        tile = replace(TILE, levels=1)
    elif case == "sorted":
        logits = logits.sort(1, descending=True).values
    arguments = _arguments(logits, WIDE)
    assert torch.equal(_draw(arguments, device, tile=tile), sample.reference(*arguments, 63))


def test_a_wide_row_does_not_depend_on_its_batch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its neighbours, nor how many programs share it, nor a superset of flags change a token."""
    torch.manual_seed(5)
    logits = torch.randn(len(WIDE), 1500) * 0.3
    arguments = _arguments(logits, WIDE)
    together = _draw(arguments, device)
    for splits in (1, 2):
        monkeypatch.setattr("headway.kernels.sample.triton.splits_for", lambda rows, segments, n=splits: n)
        assert torch.equal(_draw(arguments, device), together)
    few = [*(each[:6] for each in arguments[:2]), *arguments[2:]]
    assert torch.equal(_draw(few, device, 63 - TWICE), together[:6])


def test_missing_flags_only_cost_time(device: str) -> None:
    torch.manual_seed(7)
    arguments = _arguments(torch.randn(2, 1500) * 0.3, WIDE[-2:])
    whole = _draw(arguments, device)
    for flags in (7, 15):
        assert torch.equal(_draw(arguments, device, flags), whole)


def test_rows_that_are_not_wide_are_left_alone(device: str) -> None:
    torch.manual_seed(6)
    arguments = _arguments(torch.randn(3, 1500), NARROW)
    arguments[1][2] = -1
    assert torch.equal(_draw(arguments, device), _draw(arguments, device, 7))


def test_what_may_be_wide() -> None:
    assert all(may_be_wide(*filters) for filters in WIDE)
    assert not any(may_be_wide(*filters) for filters in [*NARROW, (WIDE_K, 0.5, 0.5)])


def test_splits_fill_the_device_and_no_more() -> None:
    assert [splits_for(rows, 38) for rows in (1, 8, 64, 256, 4096)] == [38, 38, 17, 5, 4]
