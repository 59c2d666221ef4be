"""Blocks of requests: prefix hits at admission, growth, registration, release."""

from __future__ import annotations

from headway.core.config import SchedulerConfig
from headway.core.ints import cdiv
from headway.core.plan import Int32s
from headway.scheduler.block_pool import BlockPool
from headway.scheduler.prefix import PrefixIndex
from headway.scheduler.request import Request

HEADROOM_DIVISOR = 100
"""While others run, an admission leaves 1/100 of the pool free, so that it is not preempted at once."""


class KVManager:
    """The only writer of ``Request.block_ids``, ``digests`` and ``num_registered``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self._index = PrefixIndex(config.block_size)
        self.pool = BlockPool(config.num_blocks, self._index)
        self._unnamed: list[tuple[Request, Int32s, int]] = []

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0..1."""
        return 1.0 - self.pool.num_free / (self.pool.num_blocks - 1)

    @property
    def num_cached(self) -> int:
        """Blocks the prefix index names."""
        self.settle()
        return len(self._index)

    def may_hit(self, request: Request) -> bool:
        """Prompt log-probabilities need the logits of every position: such a request skips nothing."""
        return self.caching and request.prompt_rows is None

    def lookup(self, request: Request) -> list[int]:
        """Blocks that already hold the request's first tokens; at least one token is always left to run."""
        if not self.may_hit(request):
            return []
        self.settle()
        hits: list[int] = []
        for i in range((len(request.tokens) - 1) // self.block_size):
            if len(request.digests) == i:
                self._index.extend(request.digests, request.message.cache_salt, request.tokens, i + 1)
            block_id = self._index.find(request.digests[i])
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def fits(self, request: Request, hits: list[int], others_run: bool) -> bool:
        """Whether all the request's known tokens could be stored now, chunked or not."""
        needed = cdiv(len(request.tokens), self.block_size) - len(hits)
        needed += sum(self.pool.refs(b) == 0 for b in hits)
        headroom = self.pool.num_blocks // HEADROOM_DIVISOR if others_run else 0
        return needed + headroom <= self.pool.num_free

    def open(self, request: Request, hits: list[int]) -> None:
        """Starts an incarnation of the request on the blocks it hit."""
        for block_id in hits:
            self.pool.share(block_id)
        request.block_ids = list(hits)
        request.num_registered = len(hits)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Gives the request room for ``num_tokens`` tokens; returns the new blocks. Room has been checked."""
        new = self.pool.take(cdiv(num_tokens, self.block_size) - len(request.block_ids))
        request.block_ids += new
        return new

    def grow_by_one(self, requests: list[Request]) -> list[int]:
        """Gives each request one block more; returns the blocks. Room has been checked."""
        new = self.pool.take(len(requests))
        for request, block_id in zip(requests, new, strict=True):
            request.block_ids.append(block_id)
        return new

    def register(self, request: Request, tokens: Int32s, num_written: int) -> None:
        """Names the request's full blocks among its first ``num_written`` tokens.

        Args:
            tokens: int32, the request's tokens, at least ``num_written`` of them known.
            num_written: tokens whose KV is written by steps launched or about to be; never one that an ended
                request leaves unwritten.
        """
        first, full, digests = request.num_registered, num_written // self.block_size, request.digests
        if not self.caching or full <= first:
            return
        if len(digests) < full:
            self._index.extend(digests, request.message.cache_salt, tokens, full)
        self._index.register(digests, request.block_ids, first, full)
        request.num_registered = full

    def register_later(self, request: Request, tokens: Int32s, num_written: int) -> None:
        """``register``, at ``settle`` or when somebody looks for a prefix: the step that fills the blocks need not wait."""
        self._unnamed.append((request, tokens, num_written))

    def settle(self) -> None:
        """Name what is to be named."""
        if self._unnamed:
            for each in self._unnamed:
                self.register(*each)
            self._unnamed.clear()

    def release(self, request: Request) -> None:
        """Gives all blocks back; the end of the chain is recycled first, so that shorter prefixes live longer."""
        self.settle()
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered = 0

    def forget_prefixes(self) -> None:
        """Nothing computed so far will be hit again; what requests hold stays theirs."""
        self._unnamed.clear()
        self.pool.forget_names()
