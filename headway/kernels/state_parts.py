"""How recurrent operations run on CPUs, where query lengths may be read: short rows together, every other row alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from headway.kernels.state_rows import Replay


class Part(NamedTuple):
    """Live rows that run together, as a step of their own whose states are theirs alone.

    Attributes:
        rows: int64 [R'], of the step.
        tokens: int64 [T'], or a slice, of the step.
        slots: int64 [R'], where their states lie.
        query_start, row_slots, seq_lens: int32, of this part; ``row_slots`` counts ``slots``.
        longest: most tokens of a row.
        fresh: bool, a row alone begins at position 0.
    """

    rows: torch.Tensor
    tokens: torch.Tensor | slice
    slots: torch.Tensor
    query_start: torch.Tensor
    row_slots: torch.Tensor
    seq_lens: torch.Tensor
    longest: int
    fresh: bool


def parts_of(
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, num_slots: int, short: int
) -> Iterator[Part]:
    """The parts of a step, that of the rows of at most ``short`` tokens first. Rows that are not live are in none."""
    starts, lens = query_start.tolist(), seq_lens.tolist()  # host: CPU tensors
    live = [
        (row, slot, starts[row], starts[row + 1], lens[row])
        for row, slot in enumerate(row_slots.tolist())  # host: CPU tensors
        if 0 <= slot < num_slots and starts[row + 1] > starts[row] and lens[row] >= starts[row + 1] - starts[row]
    ]
    together = [each for each in live if each[3] - each[2] <= short]
    if together:
        counts = torch.tensor([0] + [end - first for _, _, first, end, _ in together])
        yield Part(
            torch.tensor([row for row, *_ in together]),
            torch.cat([torch.arange(first, end) for _, _, first, end, _ in together]),
            torch.tensor([slot for _, slot, *_ in together]),
            counts.cumsum(0).int(),
            torch.arange(len(together), dtype=torch.int32),
            torch.tensor([length for *_, length in together], dtype=torch.int32),
            int(counts.max()),
            False,
        )
    for row, slot, first, end, length in live:
        count = end - first
        if count > short:
            yield Part(
                torch.tensor([row]),
                slice(first, end),
                torch.tensor([slot]),
                torch.tensor([0, count], dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                count,
                length == count,
            )


class OwnReplay:
    """The rings of a part's rows: read, given to a reference, and written back."""

    def __init__(self, part: Part, replay: Replay | None) -> None:
        self._part, self._whole = part, replay
        self.own: Replay | None = None
        if replay is not None:
            stored_at = replay.stored_at[part.rows]
            again = part.seq_lens - part.query_start.diff() - stored_at
            most = int(again.max())  # host: CPU tensors
            self.own = Replay(replay.inputs[part.slots], stored_at, replay.store_at[part.rows], most)

    def write_back(self) -> None:
        """What the reference has put into the rings."""
        if self.own is not None and self._whole is not None:
            self._whole.inputs[self._part.slots] = self.own.inputs


def available() -> bool:
    """Torch is all that these need."""
    return True
