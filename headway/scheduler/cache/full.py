"""Blocks of layers that need every token until the request ends."""

from __future__ import annotations

from headway.core.plan import Exact
from headway.scheduler.cache.base import GroupBlocks


class FullBlocks(GroupBlocks):
    """Every block is needed as long as the request runs."""

    def first_needed(self, position: Exact) -> int:
        return 0

    def hit(self, digests: list[bytes], most: int) -> int:
        return next((i for i in range(most) if self.cached(digests[i]) is None), most)
