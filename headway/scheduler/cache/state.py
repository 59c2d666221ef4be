"""Checkpoints of states: which slot of the state pool holds the states behind which prefix.

Keys and values of a prefix lie in blocks and stay; of a state there is only the latest. So a request can go on behind
a cached prefix only where its states were copied to a checkpoint when a row ended there. Rows are cut where that is
worth a copy: at the last block boundary of a prompt, where a prompt leaves a prefix that another request has had (the
second of many that share it saves, all others hit), and every few thousand tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from headway.core.errors import HeadwayError
from headway.core.plan import Exact

LEAST_BLOCKS = 4
"""Shorter prefixes are not worth a checkpoint."""


class StateCheckpoints:
    """The checkpoints of one engine; a fixed number, the least recently used one gives way.

    Args:
        count: checkpoints.
        first_slot: in the pool of states, behind those of requests.
        every: tokens between the checkpoints of a long prompt, a multiple of ``block_size``.
        forgotten: blocks at the end of a prefix that are never hit (``SchedulerConfig.forgets_last_hit``).
    """

    def __init__(self, count: int, first_slot: int, block_size: int, every: int, forgotten: int = 0) -> None:
        self._count, self._first, self._block_size, self._every = count, first_slot, block_size, every
        self._forgotten = forgotten
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._named: OrderedDict[bytes, int] = OrderedDict()
        self._written: list[tuple[bytes, int]] = []  # by the step that is being planned; nobody may read them in it

    def __len__(self) -> int:
        return len(self._named)

    def hit(self, digests: list[bytes], most: int) -> int:
        """Blocks of the longest prefix, of at most ``most`` blocks, that has a checkpoint behind it."""
        return next((depth for depth in range(most, 0, -1) if digests[depth - 1] in self._named), 0)

    def load(self, digest: bytes) -> int:
        """The slot of the checkpoint behind the prefix named ``digest``; it is the most recently used one then."""
        self._named.move_to_end(digest)
        return self._named[digest]

    def next_place(self, start: Exact, known: Exact, junction: Exact) -> Exact | None:
        """The first place behind ``start`` that wants a checkpoint, in a request of ``known`` tokens; None: there is none.

        Args:
            junction: where the request leaves a cached prefix that has no checkpoint behind it; 0: nowhere.
        """
        size = self._block_size
        places = (((known - 1) // size - self._forgotten) * size, junction, (start // self._every + 1) * self._every)
        wanted = [place for place in places if max(start, LEAST_BLOCKS * size - 1) < place < known]
        return Exact(min(wanted)) if wanted else None

    def save(self, digest: bytes) -> int | None:
        """The slot that the states behind the prefix named ``digest`` shall be copied to by the step that is being
        planned. None: there is such a checkpoint already. Requests hit it from the next step on."""
        if digest in self._named or any(digest == each for each, _ in self._written):
            return None
        if self._free:
            slot = self._free.pop()
        elif self._named:
            _, slot = self._named.popitem(last=False)
        else:  # all were written by this very step
            return None
        self._written.append((digest, slot))
        return slot

    def settle(self) -> None:
        """The step that was planned is on its way: what it writes can be hit by later ones."""
        self._named.update(self._written)
        self._written.clear()

    def forget(self) -> None:
        """Nothing saved so far will be hit again."""
        self.settle()
        self._free += self._named.values()
        self._named.clear()

    def check(self) -> None:
        """Raises HeadwayError unless every checkpoint is free or named, once."""
        slots = sorted([*self._free, *self._named.values(), *(slot for _, slot in self._written)])
        if slots != list(range(self._first, self._first + self._count)):
            raise HeadwayError("checkpoints of states are lost, or named twice")
