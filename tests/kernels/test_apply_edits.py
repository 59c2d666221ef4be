"""``apply_edits``: edits arrive, illegal ones are dropped whole, nothing else moves."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.apply_edits import apply_edits
from tests.kernels.guarded import expect, ints, run_both


def _packed(
    edits: list[tuple[int, int, int]], payload: list[int], *, at: int | None = None, count: int | None = None
) -> torch.Tensor:
    """A buffer: header, payload, descriptors."""
    descriptors = [number for edit in edits for number in edit]
    header = [len(edits) if count is None else count, 16 + len(payload) if at is None else at] + [0] * 14
    return ints(header + payload + descriptors)


@pytest.mark.parametrize("seed", range(4))
def test_edits_equal_slice_assignment(seed: int) -> None:
    rng = random.Random(seed)
    arena, payload = (
        ints([rng.randrange(1000) for _ in range(3000)]),
        [rng.randrange(-(2**31), 2**31) for _ in range(1500)],
    )
    edits, place = [], 0
    while place < 2000:
        size = rng.choice([0, 1, 1, 7, 333, 1024])
        edits.append((place, 16 + rng.randrange(len(payload) - min(size, 1400)), size))
        place += size + rng.randrange(3)
    edits = [edit for edit in edits if edit[0] + edit[2] <= 3000]
    packed = _packed(edits, payload)
    expected = arena.clone()
    for dst, src, size in edits:
        expected[dst : dst + size] = packed[src : src + size]
    expect(apply_edits, (arena, packed, len(edits) + 3), {0: expected})


@pytest.mark.parametrize(
    "edit",
    [
        (-1, 16, 2),
        (19, 16, 2),
        (2, -1, 3),
        (2, 20, 2**30),
        (2, 23, 3),
        (0, 16, -5),
        (2**31 - 1, 16, 4),
        (0, 2**31 - 2, 4),
    ],
)
def test_illegal_edits_are_dropped_whole(edit: tuple[int, int, int]) -> None:
    arena = torch.arange(20, dtype=torch.int32)
    packed = _packed([edit, (4, 16, 2)], [100, 101])
    expected = arena.clone()
    expected[4:6] = ints([100, 101])
    expect(apply_edits, (arena, packed, 2), {0: expected})


def test_an_edit_longer_than_the_limit_is_dropped() -> None:
    arena = torch.zeros(2000, dtype=torch.int32)
    expect(apply_edits, (arena, _packed([(0, 16, 1025)], [1] * 1100), 1), {0: arena})


@pytest.mark.parametrize(("at", "count"), [(-3, 2), (10**6, 1), (2**31 - 1, 1), (21, 1)])
def test_descriptors_outside_the_buffer_are_dropped(at: int, count: int) -> None:
    arena = torch.arange(8, dtype=torch.int32)
    packed = _packed([(0, 16, 2)], [5, 6], at=at, count=count)
    for after, _ in run_both(apply_edits, (arena, packed, 2)):
        assert torch.equal(after[0][2:], arena[2:])


def test_no_edits() -> None:
    arena = torch.arange(8, dtype=torch.int32)
    expect(apply_edits, (arena, _packed([], []), 0), {0: arena})
    expect(apply_edits, (arena, _packed([], []), 4), {0: arena})
