"""Blocks of encoder outputs, which cross-attention reads: taken whole at admission, written by one job, and never again.

They are named by what was encoded. So requests on the same recording share them, and a preempted request finds its own again
unless they were recycled meanwhile; then its item is encoded once more.
"""

from __future__ import annotations

import numpy as np

from headway.core.encode import EncoderItem
from headway.core.ints import cdiv
from headway.core.plan import Int32s
from headway.scheduler.cache.pool import BlockPool
from headway.scheduler.cache.prefix import PrefixIndex
from headway.scheduler.request import Request


class CrossBlocks:
    """The only writer of ``Request.cross``.

    Args:
        number: index of the group, whose block table holds the blocks.
        caching: whether blocks are named at all.
    """

    def __init__(self, number: int, block_size: int, index: PrefixIndex, pool: BlockPool, *, caching: bool) -> None:
        self.number, self._block_size, self._index, self._pool, self._caching = number, block_size, index, pool, caching

    def lookup(self, request: Request) -> list[int] | None:
        """Blocks that hold the outputs of the request's item; None: it must be encoded."""
        if not self._caching:
            return None
        names = self._names(request)
        found = [block for name in names if (block := self._index.find(name, self.number)) is not None]
        return found if len(found) == len(names) else None

    def missing(self, request: Request, found: list[int] | None) -> int:
        """Free blocks that the request takes out of the pool."""
        if found is None:
            return cdiv(_item(request).rows, self._block_size)
        return sum(self._pool.refs(block) == 0 for block in found)

    def share(self, request: Request, found: list[int] | None) -> None:
        """Hold the blocks that were found, before anything else is taken."""
        for block in found or ():
            self._pool.share(block)
        request.cross = list(found or ())

    def take(self, request: Request) -> Int32s:
        """Blocks for an item that must be encoded, in a job of the step that is planned; room has been checked.

        Returns:
            int32 [rows], the place of each output.
        """
        rows = _item(request).rows
        request.cross = self._pool.take(cdiv(rows, self._block_size))
        if self._caching:  # whoever reads them by this name has rows behind the job
            names = self._names(request)
            self._index.register(names, request.cross, 0, len(names), self.number)
        places = np.array(request.cross, np.int32)[:, None] * self._block_size + np.arange(self._block_size)
        return places.astype(np.int32).ravel()[:rows]

    def release(self, request: Request) -> None:
        """Give the blocks back; they keep their names until they are recycled."""
        self._pool.release(reversed(request.cross))
        request.cross = []

    def _names(self, request: Request) -> list[bytes]:
        item = _item(request)
        return self._index.names_of(item.key, request.message.cache_salt, cdiv(item.rows, self._block_size))


def _item(request: Request) -> EncoderItem:
    [item] = request.message.media
    return item
