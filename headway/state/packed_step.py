"""The packed step: all that the host tells the device about one step, in one int32 buffer and one copy.

```
[0..16)   header: number of edits, offset of their descriptors, rows, tokens, offset of the rows, result ring index
rows      4 ints each: slot, tokens in this step, first token, samples (0/1)
payload   values of the edits, and lists that some operations read in place
edits     3 ints each: arena position, payload position, length (at most MAX_EDIT)
```
The kernels ``apply_edits`` and ``step_unpack`` read it; nothing else on the device does, except through ``list_at``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.plan import Int32s, StepPlan

HEADER_INTS = 16
ROW_INTS = 4
EDIT_INTS = 3
MAX_EDIT = 1024
"""Most values one edit may carry; longer ones are cut, so that the kernel's work per edit is bounded."""


def num_edits_for(num_values: int) -> int:
    """Edits that a segment of ``num_values`` is cut into."""
    return -(-num_values // MAX_EDIT)


def segment_ints(num_values: int) -> int:
    """Ints a segment takes in the buffer, descriptors included."""
    return num_values + EDIT_INTS * num_edits_for(num_values)


class PackedRows:
    """The beginning of a packed step, int32 [16 + 4 R]: header (no edits, result index 0) and rows. Same rows, same ints."""

    def __init__(self, plan: StepPlan) -> None:
        num_rows = plan.num_rows
        self.num_tokens = plan.num_tokens
        self.ints: Int32s = np.zeros(HEADER_INTS + ROW_INTS * num_rows, np.int32)
        self.ints[2], self.ints[3], self.ints[4] = num_rows, self.num_tokens, HEADER_INTS
        rows = self.ints[HEADER_INTS:].reshape(num_rows, ROW_INTS)
        rows[:, 0] = plan.slots
        rows[:, 1] = plan.query_lens
        np.cumsum(plan.query_lens[:-1], out=rows[1:, 2])
        rows[:, 3] = plan.samples


class PackedStep:
    """Writes one packed step into a host buffer.

    Args:
        ints: int32 [P], the staging buffer; too small a buffer is a bug of the scheduler's upload budget (AssertionError).
    """

    def __init__(self, ints: Int32s, rows: PackedRows, result_index: int) -> None:
        self._ints = ints
        self.num_tokens = rows.num_tokens
        self._end = len(rows.ints)
        ints[: self._end] = rows.ints
        ints[5] = result_index
        self._edits: list[npt.NDArray[np.int32]] = []
        self.num_edits = 0

    def list_at(self, values: Int32s) -> int:
        """Append ``values`` to the payload; returns their position, where a kernel reads them in place."""
        start = self._end
        self._end += len(values)
        assert self._end <= len(self._ints), "packed step overflows: upload budget too generous"
        self._ints[start : self._end] = values
        return start

    def write(self, position: int, values: Int32s) -> None:
        """Edit: arena[position : position + len(values)] = values."""
        count = num_edits_for(len(values))
        source = self.list_at(values)
        edits = np.empty((count, EDIT_INTS), np.int32)
        starts = np.arange(count, dtype=np.int32) * MAX_EDIT
        edits[:, 0] = position + starts
        edits[:, 1] = source + starts
        edits[:, 2] = np.minimum(len(values) - starts, MAX_EDIT)
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
