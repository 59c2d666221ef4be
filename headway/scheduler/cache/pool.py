"""KV blocks: reference counts, free blocks, and cached blocks in order of last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from headway.core.errors import HeadwayError
from headway.scheduler.cache.prefix import PrefixIndex

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks-1. A block that no request holds is free; if the index names it, it can still be hit.

    Free blocks without a name are taken first, then named ones, least recently released first.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def take(self, count: int) -> list[int]:
        """Blocks for new content, each held once. The caller has checked ``num_free``."""
        kept = max(len(self._blank) - count, 0)
        taken = self._blank[kept:]
        del self._blank[kept:]
        taken.reverse()
        while len(taken) < count:
            block_id, _ = self._cached.popitem(last=False)
            self._index.forget(block_id)
            taken.append(block_id)
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """One more holder of a named block."""
        if self._refs[block_id] == 0:
            del self._cached[block_id]
        self._refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less of each. The first released is the first recycled: pass a chain's end first."""
        for block_id in block_ids:
            left = self._refs[block_id] - 1
            self._refs[block_id] = left
            if left == 0:
                if block_id in self._index:
                    self._cached[block_id] = None
                else:
                    self._blank.append(block_id)

    def forget_names(self) -> None:
        """Empties the index; cached blocks become plain free ones."""
        self._index.clear()
        self._blank += self._cached
        self._cached.clear()

    def check(self, held: Iterable[int]) -> None:
        """Raises HeadwayError unless reference counts equal ``held`` (one entry per holder) and no block is lost."""
        expected = [0] * self.num_blocks
        for block_id in held:
            expected[block_id] += 1
        if expected != self._refs:
            wrong = [i for i, (a, b) in enumerate(zip(expected, self._refs, strict=True)) if a != b]
            raise HeadwayError(f"reference counts of blocks {wrong[:8]} do not match their holders")
        free = sorted([*self._blank, *self._cached])
        if free != [i for i in range(1, self.num_blocks) if not expected[i]]:
            raise HeadwayError("free blocks are not exactly the blocks that no request holds")
        if any(i not in self._index for i in self._cached) or any(i in self._index for i in self._blank):
            raise HeadwayError("the free lists disagree with the prefix index")
