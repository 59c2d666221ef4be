"""The encoder cache: which of its rows hold the outputs of which item.

Rows are dealt out in whole ranges. A range belongs to its item until another one needs the room; items that a request is about
to read are held. What frees a range is the plan behind the last step that reads it, not that step's end: whatever writes there
next is part of a later step, and steps run in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headway.core.errors import HeadwayError


@dataclass(slots=True)
class Range:
    """Rows [start, start + rows) of an item; ``users`` requests hold it."""

    start: int
    rows: int
    users: int = 0


class EncoderCache:
    """Ranges of ``num_rows`` rows, by name; the one that was used longest ago goes first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._ranges: OrderedDict[object, Range] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranges)

    def __contains__(self, name: object) -> bool:
        return name in self._ranges

    def hold(self, name: object) -> Range | None:
        """The item's rows, which stay until they are released; None: it is not there."""
        found = self._ranges.get(name)
        if found is not None:
            found.users += 1
            self._ranges.move_to_end(name)
        return found

    def take(self, name: object, rows: int) -> Range | None:
        """Hold rows for an item that is to be encoded; None: all that could go is not enough."""
        assert name not in self._ranges, "an item is encoded once"
        start = self._gap(rows)
        if start is None:
            idle = [each for each, held in self._ranges.items() if not held.users]
            for each in idle:
                del self._ranges[each]
                start = self._gap(rows)
                if start is not None:
                    break
        if start is None:
            return None
        self._ranges[name] = found = Range(start, rows, 1)
        return found

    def is_held(self, name: object) -> bool:
        """Whether some request needs the item."""
        found = self._ranges.get(name)
        return found is not None and found.users > 0

    def release(self, name: object) -> None:
        """One request less needs the item."""
        found = self._ranges[name]
        if not found.users:
            raise HeadwayError("encoder outputs were released more often than held")
        found.users -= 1

    def forget(self, name: object) -> None:
        """The item was never encoded, or nobody shall find it. Unknown names are ignored."""
        self._ranges.pop(name, None)

    def _gap(self, rows: int) -> int | None:
        """The first room for ``rows`` rows."""
        start = 0
        for held in sorted(self._ranges.values(), key=lambda each: each.start):
            if held.start - start >= rows:
                return start
            start = held.start + held.rows
        return start if self.num_rows - start >= rows else None

    def check(self, num_held: int) -> None:
        """Raises HeadwayError when ranges overlap, or are held by others than the ``num_held`` holds there are."""
        end = 0
        for held in sorted(self._ranges.values(), key=lambda each: each.start):
            if held.start < end:
                raise HeadwayError("two items share rows of the encoder cache")
            end = held.start + held.rows
        if end > self.num_rows:
            raise HeadwayError("an item lies behind the end of the encoder cache")
        users = sum(held.users for held in self._ranges.values())
        if users != num_held:
            raise HeadwayError(f"encoder outputs are held {users} times, by requests {num_held} times")
