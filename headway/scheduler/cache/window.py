"""Blocks of layers that see the last tokens only, of a window or of a chunk: those wholly behind it are given back while the
request runs.

They are given back by the *exact* least position of the row's next token, and taken by the bound: where drafts may be rejected,
a block that lies behind the window of the bound may still be read.
"""

from __future__ import annotations

from headway.core.plan import Exact
from headway.scheduler.cache.base import GroupBlocks


class WindowBlocks(GroupBlocks):
    """A token at position p reads positions p - window + 1 up to p."""

    def first_needed(self, position: Exact) -> int:
        return max(0, position - self._group.window + 1) // self._block_size

    def hit(self, digests: list[bytes], most: int) -> int:
        """See ``GroupBlocks``. Walks back from ``most`` to the first depth whose whole window is cached."""
        depth = below = most  # all blocks [below, depth) are cached
        while depth:
            least = self.first_needed(Exact(depth * self._block_size))
            while below > least and self.cached(digests[below - 1]) is not None:
                below -= 1
            if below <= least:
                return depth
            depth = below = below - 1  # without that block nothing between it and ``depth`` can go on either
        return 0


class ChunkBlocks(WindowBlocks):
    """A token at position p reads the positions of its own chunk, p // chunk * chunk up to p."""

    def first_needed(self, position: Exact) -> int:
        return position // self._group.window * self._group.window // self._block_size
