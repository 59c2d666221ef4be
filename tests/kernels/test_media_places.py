"""``media_places``: the kernel and the reference against the definition, token by token."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.media_places import media_places
from headway.kernels.testing import interpreter_loops

RUNS = [[], [(0, 3)], [(2, 3), (3, 9)], [(0, 1), (4, 8), (20, 33)], [(31, 64)]]


def media_tables(slots: int, most: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.full((slots, 2 + 6 * most), 777, dtype=torch.int32)  # what slots had before
    rows = torch.full((slots, most), 555, dtype=torch.int32)
    for slot in range(slots):
        runs = RUNS[slot % len(RUNS)]
        table[slot, 0], table[slot, 1] = len(runs), 7 if slot == 2 else 0
        behind = 0
        for k, (start, end) in enumerate(runs):
            base, columns = start + behind, (slot + k) % 4  # 0: a recording's
            behind = base + 2 - end
            table[slot, 2 + 6 * k : 8 + 6 * k] = torch.tensor([start, end, base, columns, behind, 5 * k])
            rows[slot, k] = 100 * slot + 10 * k
    return table.to(device), rows.to(device)


def defined(
    positions: list[int], slots: list[int], table: torch.Tensor, rows: torch.Tensor, sees: bool
) -> torch.Tensor:
    """By the definition, token by token."""
    found = []
    for position, slot in zip(positions, slots, strict=True):
        if not 0 <= slot < len(table):
            found.append([-1, 0, 0, 0, 0])
            continue
        own = table[slot].tolist()
        row, end, place, behind = -1, max(position + 1, own[1] if position < own[1] else 0), None, 0
        for k in range(own[0]):
            start, past, base, columns, after, late = own[2 + 6 * k : 8 + 6 * k]
            if start <= position < past:
                row, i = int(rows[slot, k]) + position - start, position - start
                end = max(end, past) if sees and columns else end
                columns = max(columns, 1)
                place = [base + late, base + i // columns, base + i % columns]
            elif position >= past:
                behind = after
        found.append([row, end, *(place or [position + behind] * 3)])
    return torch.tensor(found, dtype=torch.int32).T


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("most", [3, 8])
def test_places(most: int, sees: bool, device: str) -> None:
    table, rows = media_tables(6, most, device)
    lengths, slots, starts = [1, 40, 1, 66, 7, 2, 0], [3, 2, -1, 4, 1, 99, 0], [25, 0, 5, 0, 6, 1, 0]
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)] + [0, 0]
    of_tokens = [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)] + [-1, -1]
    tensors = [torch.tensor(positions, dtype=torch.int32), query_start, torch.tensor(slots, dtype=torch.int32)]
    expected = defined(positions, of_tokens, table.cpu(), rows.cpu(), sees)
    args = (*[each.to(device) for each in tensors], table, rows, sees)
    assert torch.equal(media_places.reference(*args).cpu(), expected)
    with interpreter_loops():
        assert torch.equal(media_places.implementation("cuda")(*args).cpu(), expected)


def test_meta_gives_shapes() -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    assert media_places(ints(7), ints(4), ints(3), ints(5, 14), ints(5, 2), True).shape == (5, 7)
