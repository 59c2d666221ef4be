"""How recurrent operations run on CPUs, where query lengths may be read: rows of one token together, every other row
alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Live rows that run together, as a step of their own whose states are theirs alone.

    Attributes:
        tokens: int64 [T'], or a slice, of the step.
        slots: int64 [R'], where their states lie.
        query_start, row_slots, seq_lens: int32, of this part; ``row_slots`` counts ``slots``.
        longest: most tokens of a row.
        fresh: bool, the first row begins at position 0.
    """

    tokens: torch.Tensor | slice
    slots: torch.Tensor
    query_start: torch.Tensor
    row_slots: torch.Tensor
    seq_lens: torch.Tensor
    longest: int
    fresh: bool


def parts_of(
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, num_slots: int
) -> Iterator[Part]:
    """The parts of a step, those of single tokens first. Rows that are not live are in none."""
    starts, lens = query_start.tolist(), seq_lens.tolist()  # host: CPU tensors
    live = [
        (slot, starts[row], starts[row + 1], lens[row])
        for row, slot in enumerate(row_slots.tolist())  # host: CPU tensors
        if 0 <= slot < num_slots and starts[row + 1] > starts[row] and lens[row] >= starts[row + 1] - starts[row]
    ]
    single = [each for each in live if each[2] - each[1] == 1]
    if single:
        rows = len(single)
        yield Part(
            torch.tensor([first for _, first, _, _ in single]),
            torch.tensor([slot for slot, _, _, _ in single]),
            torch.arange(rows + 1, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int32),
            torch.tensor([length for _, _, _, length in single], dtype=torch.int32),
            1,
            single[0][3] == 1,
        )
    for slot, first, end, length in live:
        count = end - first
        if count > 1:
            yield Part(
                slice(first, end),
                torch.tensor([slot]),
                torch.tensor([0, count], dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                count,
                length == count,
            )


def available() -> bool:
    """Torch is all that these need."""
    return True
