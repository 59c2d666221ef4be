"""``GroupBlocks``: what one group of layers asks of the blocks of a request.

All groups take their blocks from one pool, and a request has a block index in every group or in none: block i of a group holds
tokens [i * block_size, (i + 1) * block_size). Groups differ in how long they need a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from headway.core.cache import CacheGroup
from headway.core.plan import Exact
from headway.scheduler.cache.prefix import PrefixIndex


class GroupBlocks(ABC):
    """The rules of one group.

    Args:
        number: index of the group.
        group: as it was declared.
        index: names of blocks that can be hit.
    """

    def __init__(self, number: int, group: CacheGroup, block_size: int, index: PrefixIndex) -> None:
        self.number, self._group, self._block_size, self._index = number, group, block_size, index

    @abstractmethod
    def first_needed(self, position: Exact) -> int:
        """Index of the first block that is read by a token at ``position`` or behind it; those before it can be given back."""

    @abstractmethod
    def hit(self, digests: list[bytes], most: int) -> int:
        """Blocks of the longest prefix, of at most ``most`` blocks, behind which a request can go on: all that its next token
        reads is cached."""

    def peak(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of ``num_tokens`` holds at once, in steps of up to ``step_tokens``."""
        return self._group.peak_blocks(num_tokens, self._block_size, step_tokens)

    def cached(self, digest: bytes) -> int | None:
        """The block that holds the prefix named ``digest``."""
        return self._index.find(digest, self.number)
