"""The packed step: all that the host tells the device about one step, in one int32 buffer and one copy.

```
[0..16)   header: number of edits, offset of their descriptors, rows, tokens, offset of the rows, result ring index, decode rows
          (0 where these have drafts: attention treats rows of several tokens as prompts), position and entries of the
          chunk table, and those of two lists of states to copy (models with states only; see ``core.chunks``)
[16..512) payload and edits of a step whose rows are those of the step before, and stay where they are
[512..)   rows, 4 ints each: slot, tokens in this step, first token, outcomes (tokens it can bring: 0, 1, or of a decode row
          as many as it has)
payload   values of the edits, and lists that some operations read in place
edits     3 ints each: arena position, payload position, length (at most MAX_EDIT)
```
In steady decode a hundred bytes are sent: on an H200 a copy of more than 1 KB takes 10 us longer. The kernels
``apply_edits`` and ``step_unpack`` read it, attention the number of decode rows; nothing else on the device does, except
through ``list_at``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.chunks import CHUNKS_AT, LOADS_AT, SAVES_AT, chunk_table
from headway.core.plan import Int32s, StepPlan

HEADER_INTS = 16
ROWS_AT = 512
ROW_INTS = 4
EDIT_INTS = 3
DECODE_ROWS_AT = 6
MAX_EDIT = 1024
"""Most values one edit may carry; longer ones are cut, so that the kernel's work per edit is bounded."""


def num_edits_for(num_values: int) -> int:
    """Edits that a segment of ``num_values`` is cut into."""
    return -(-num_values // MAX_EDIT)


def segment_ints(num_values: int) -> int:
    """Ints a segment takes in the buffer, descriptors included."""
    return num_values + EDIT_INTS * num_edits_for(num_values)


def fits_before_rows(num_values: int) -> bool:
    """Whether as many edits of a single value fit into the room that lies before the rows."""
    return HEADER_INTS + (1 + EDIT_INTS) * num_values <= ROWS_AT


class PackedRows:
    """What packed steps of the same rows have in common.

    Attributes:
        header: int32 [16], without edits, result index 0.
        rows: int32 [4 R].
    """

    def __init__(self, plan: StepPlan) -> None:
        num_rows = plan.num_rows
        self.num_tokens = plan.num_tokens
        self.header: Int32s = np.zeros(HEADER_INTS, np.int32)
        self.header[2], self.header[3], self.header[4] = num_rows, self.num_tokens, ROWS_AT
        self.header[DECODE_ROWS_AT] = plan.num_decode_rows if plan.width == 1 else 0
        self.rows: Int32s = np.zeros(ROW_INTS * num_rows, np.int32)
        rows = self.rows.reshape(num_rows, ROW_INTS)
        rows[:, 0] = plan.slots
        rows[:, 1] = plan.query_lens
        np.cumsum(plan.query_lens[:-1], out=rows[1:, 2])
        rows[:, 3] = plan.samples & (not plan.pools)
        if plan.width > 1:
            rows[: plan.num_decode_rows, 3] = plan.query_lens[: plan.num_decode_rows]


class PackedStep:
    """Writes one packed step into a host buffer.

    Args:
        ints: int32 [P], the staging buffer; too small a buffer is a bug of the scheduler's upload budget (AssertionError).
        sent: the device has the rows already; ``fits_before_rows`` has been asked.
    """

    def __init__(self, ints: Int32s, rows: PackedRows, result_index: int, sent: bool = False) -> None:
        self._ints = ints
        self.num_tokens = rows.num_tokens
        ints[:HEADER_INTS] = rows.header
        ints[5] = result_index
        if sent:
            self._end, self._limit = HEADER_INTS, ROWS_AT
        else:
            self._end, self._limit = ROWS_AT + len(rows.rows), len(ints)
            ints[ROWS_AT : self._end] = rows.rows
        self._edits: list[npt.NDArray[np.int32]] = []
        self.num_edits = 0

    def list_at(self, values: Int32s) -> int:
        """Append ``values`` to the payload; returns their position, where a kernel reads them in place."""
        start = self._end
        self._end += len(values)
        assert self._end <= self._limit, "packed step overflows: upload budget too generous"
        self._ints[start : self._end] = values
        return start

    def chunks(self, query_lens: Int32s, short: int) -> None:
        """Append the chunk table of rows of these lengths, and say in the header where it is."""
        table = chunk_table(query_lens, short)
        self._ints[CHUNKS_AT], self._ints[CHUNKS_AT + 1] = self.list_at(table), len(table) // 2

    def copies(self, loads: list[tuple[int, int]], saves: list[tuple[int, int]]) -> None:
        """Append the lists of states to copy, (source, destination), and say in the header where they are."""
        for header_at, pairs in ((LOADS_AT, loads), (SAVES_AT, saves)):
            listed = np.array(pairs, np.int32).reshape(-1)
            self._ints[header_at], self._ints[header_at + 1] = self.list_at(listed), len(pairs)

    def write(self, position: int, values: Int32s) -> None:
        """Edit: arena[position : position + len(values)] = values."""
        count = num_edits_for(len(values))
        source = self.list_at(values)
        if count == 1:
            self._add(np.array([[position, source, len(values)]], np.int32))
            return
        edits = np.empty((count, EDIT_INTS), np.int32)
        starts = np.arange(count, dtype=np.int32) * MAX_EDIT
        edits[:, 0] = position + starts
        edits[:, 1] = source + starts
        edits[:, 2] = np.minimum(len(values) - starts, MAX_EDIT)
        self._add(edits)

    def write_runs(self, positions: npt.NDArray[np.integer], lengths: Int32s, values: Int32s) -> None:
        """``write`` of ``values`` run by run, none of them empty: the next ``lengths[i]`` to ``positions[i]``."""
        source = self.list_at(values)
        starts = np.zeros(len(lengths), np.int32)
        np.cumsum(lengths[:-1], out=starts[1:])
        pieces = -(-lengths // MAX_EDIT)
        run = np.repeat(np.arange(len(lengths)), pieces)
        first = np.arange(len(run)) - np.repeat(pieces.cumsum() - pieces, pieces)  # of a run's pieces
        first *= MAX_EDIT
        edits = np.empty((len(run), EDIT_INTS), np.int32)
        edits[:, 0] = positions[run] + first
        edits[:, 1] = source + starts[run] + first
        edits[:, 2] = np.minimum(lengths[run] - first, MAX_EDIT)
        self._add(edits)

    def scatter(self, positions: npt.NDArray[np.integer], values: Int32s) -> None:
        """Single-value edits: arena[positions[i]] = values[i]; positions are distinct."""
        source = self.list_at(values)
        edits = np.empty((len(values), EDIT_INTS), np.int32)
        edits[:, 0] = positions
        edits[:, 1] = np.arange(source, source + len(values), dtype=np.int32)
        edits[:, 2] = 1
        self._add(edits)

    def _add(self, edits: npt.NDArray[np.int32]) -> None:
        self._edits.append(edits)
        self.num_edits += len(edits)

    def finish(self) -> int:
        """Write the edit descriptors; returns the ints in use, the length of the copy."""
        self._ints[0] = self.num_edits
        if self._edits:
            edits = self._edits[0] if len(self._edits) == 1 else np.concatenate(self._edits)
            self._ints[1] = self.list_at(edits.reshape(-1))
        return self._end
