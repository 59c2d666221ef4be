"""Blocks of requests: prefix hits at admission, growth, registration, release, in all groups of layers together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from headway.core.cache import CacheKind
from headway.core.config import SchedulerConfig, most_step_tokens
from headway.core.ints import cdiv
from headway.core.plan import Bound, Exact, Int32s
from headway.scheduler.cache.base import GroupBlocks
from headway.scheduler.cache.cross import CrossBlocks
from headway.scheduler.cache.full import FullBlocks
from headway.scheduler.cache.pool import NULL_BLOCK, BlockPool
from headway.scheduler.cache.prefix import PrefixIndex
from headway.scheduler.cache.state import StateCheckpoints
from headway.scheduler.cache.window import ChunkBlocks, WindowBlocks
from headway.scheduler.request import Request

CLEARED_TOKENS = 256
"""Of the tokens before a window, entries of the block table are cleared as far back: kernels load whole tiles of keys."""

_RULES: Mapping[CacheKind, type[GroupBlocks]] = MappingProxyType(
    {CacheKind.FULL: FullBlocks, CacheKind.WINDOW: WindowBlocks, CacheKind.CHUNK: ChunkBlocks}
)


class Hits(NamedTuple):
    """What a request finds in the prefix cache.

    Attributes:
        depth: its first blocks, whose tokens need not be computed.
        blocks: per group the blocks that hold them, ``depth`` each; ``NULL_BLOCK`` for those that are not needed.
        state: slot of the checkpoint with the states behind them; -1: none is needed.
        cross: blocks with the outputs of its encoder item; None: they must be made, or there is none.
    """

    depth: int
    blocks: list[list[int]]
    state: int = -1
    cross: list[int] | None = None


class BlockEdit(NamedTuple):
    """A request's block table of ``group`` is ``ids`` from entry ``first`` on."""

    group: int
    first: int
    ids: list[int]


class KVManager:
    """The only writer of ``Request.blocks``, ``digests``, ``first_kept``, ``num_registered`` and ``junction``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self._step_tokens = most_step_tokens(config.max_num_batched_tokens, config.width) + config.lookahead
        self._lookahead, self._forgets_last = config.lookahead, config.forgets_last_hit
        self._headroom = config.num_blocks // config.headroom_divisor
        self._index = PrefixIndex(config.block_size, len(config.groups))
        self._groups: list[GroupBlocks] = [
            _RULES[group.kind](number, group, config.block_size, self._index)
            for number, group in enumerate(config.groups)
            if group.kind is not CacheKind.CROSS
        ]
        self.num_groups = len(self._groups)
        self._letting_go = [group for group in self._groups if group.first_needed(Exact(2**31))]
        self._keeps_all = len(self._letting_go) < self.num_groups
        self.pool = BlockPool(config.num_blocks, self._index)
        self._unnamed: list[tuple[Request, Int32s, Exact]] = []
        self.cross: CrossBlocks | None = None
        if self.num_groups < len(config.groups):
            self.cross = CrossBlocks(self.num_groups, config.block_size, self._index, self.pool, caching=self.caching)
        self.states: StateCheckpoints | None = None
        if config.has_states and self.caching:
            every = max(config.checkpoint_every // config.block_size, 1) * config.block_size
            self.states = StateCheckpoints(
                config.num_checkpoints, config.max_num_seqs, config.block_size, every, config.forgets_last_hit
            )

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, 0..1."""
        return 1.0 - self.pool.num_free / (self.pool.num_blocks - 1)

    @property
    def num_cached(self) -> int:
        """Blocks the prefix index names."""
        self.settle()
        return len(self._index)

    @property
    def lets_go(self) -> bool:
        """Whether a group gives blocks back while their request runs."""
        return bool(self._letting_go)

    @property
    def growths(self) -> int:
        """How often a request could be given one more block in every group."""
        return self.pool.num_free // self.num_groups

    # -- prefix hits -----------------------------------------------------------------------------------------------

    def may_hit(self, request: Request) -> bool:
        """Prompt log-probabilities need the logits of every position, vectors and times of tokens all hidden states: such a
        request skips nothing."""
        return self.caching and request.prompt_rows is None and not request.by_token and not request.whole

    def lookup(self, request: Request) -> Hits:
        """Blocks that already hold the request's first tokens, in all groups; at least one token is always left to run."""
        cross = None if self.cross is None else self.cross.lookup(request)
        if not self.may_hit(request):
            return Hits(0, [[] for _ in self._groups], cross=cross)
        self.settle()
        depth = self._longest_named(request, (len(request.tokens) - 1) // self.block_size)
        if self._forgets_last and depth:
            depth -= 1
        agreed, named = -1, 0
        while agreed != depth:  # a window may need a block that a shorter prefix does without
            agreed = depth
            for group in self._groups:
                depth = group.hit(request.digests, depth)
            named = max(named, depth)
            if self.states is not None:
                depth = self.states.hit(request.digests, depth)
        request.junction = Exact(named * self.block_size if self.states is not None and named > depth else 0)
        state = self.states.load(request.digests[depth - 1]) if self.states is not None and depth else -1
        position = Exact(depth * self.block_size)
        return Hits(
            depth,
            [self._found(group.number, group.first_needed(position), request, depth) for group in self._groups],
            state,
            cross,
        )

    def _longest_named(self, request: Request, most: int) -> int:
        """Up to ``most`` blocks, whose digests are known then: as many as a group that keeps all has, where there is one."""
        salt, digests, tokens = request.salt, request.digests, request.tokens
        if not self._keeps_all:
            if len(digests) < most:
                self._index.extend(digests, salt, tokens, most, request.marks)
            return most
        keeping = next(group.number for group in self._groups if group not in self._letting_go)
        for i in range(most):
            if len(digests) == i:
                self._index.extend(digests, salt, tokens, i + 1, request.marks)
            if self._index.find(digests[i], keeping) is None:
                return i
        return most

    def _found(self, group: int, first: int, request: Request, depth: int) -> list[int]:
        found = [self._index.find(digest, group) for digest in request.digests[first:depth]]
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def fits(self, request: Request, hits: Hits, others_run: bool) -> bool:
        """Whether all the request's known tokens could be stored now, chunked or not."""
        needed = self._headroom if others_run else 0
        if self.cross is not None:
            needed += self.cross.missing(request, hits.cross)
        for group, blocks in zip(self._groups, hits.blocks, strict=True):
            held = [block for block in blocks if block != NULL_BLOCK]
            needed += max(group.peak(len(request.tokens) + self._lookahead, self._step_tokens) - len(held), 0)
            needed += sum(self.pool.refs(block) == 0 for block in held)
        return needed <= self.pool.num_free

    # -- what a request holds --------------------------------------------------------------------------------------

    def open(self, request: Request, hits: Hits) -> None:
        """Starts an incarnation of the request on the blocks it hit."""
        position = Exact(hits.depth * self.block_size)
        for blocks in hits.blocks:
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    self.pool.share(block_id)
        if self.cross is not None:
            self.cross.share(request, hits.cross)
        request.blocks = [list(blocks) for blocks in hits.blocks]
        request.first_kept = [group.first_needed(position) for group in self._groups]
        request.num_registered = hits.depth

    def opening_edits(self, request: Request, cleared_tokens: int = CLEARED_TOKENS) -> Iterator[BlockEdit]:
        """What the block tables of a request that has just been opened must say."""
        margin = cdiv(cleared_tokens, self.block_size)
        for group, (blocks, first) in enumerate(zip(request.blocks, request.first_kept, strict=True)):
            start = max(first - margin, 0)
            if len(blocks) > start:
                yield BlockEdit(group, start, blocks[start:])
        if self.cross is not None:
            yield BlockEdit(self.cross.number, 0, request.cross)

    def num_held(self, request: Request) -> int:
        """Blocks that the request has an index for, in each group."""
        return len(request.blocks[0])

    def missing(self, request: Request, num_tokens: Bound) -> int:
        """Blocks to take from the pool before the request can store ``num_tokens`` tokens."""
        return (cdiv(num_tokens, self.block_size) - len(request.blocks[0])) * self.num_groups

    def room(self, request: Request) -> int:
        """Tokens that the request could store if it got all free blocks."""
        return (len(request.blocks[0]) + self.growths) * self.block_size

    def trim(self, request: Request, position: Exact) -> list[BlockEdit]:
        """Gives back the blocks that no token at ``position`` or behind it reads."""
        edits: list[BlockEdit] = []
        for group in self._letting_go:
            number, blocks = group.number, request.blocks[group.number]
            held, first = request.first_kept[number], min(group.first_needed(position), len(blocks))
            if first > held:
                self.pool.release(blocks[held:first])
                cleared = [NULL_BLOCK] * (first - held)
                blocks[held:first] = cleared
                request.first_kept[number] = first
                edits.append(BlockEdit(number, held, cleared))
        return edits

    def grow(self, request: Request, num_tokens: Bound) -> list[BlockEdit]:
        """Gives the request room for ``num_tokens`` tokens. Room has been checked."""
        held = len(request.blocks[0])
        count = cdiv(num_tokens, self.block_size) - held
        if count <= 0:
            return []
        edits = [BlockEdit(group, held, self.pool.take(count)) for group in range(self.num_groups)]
        for group, _, new in edits:
            request.blocks[group] += new
        return edits

    def grow_by_one(self, requests: list[Request]) -> list[list[int]]:
        """Gives each request one block more in every group; returns, per group, the blocks. Room has been checked."""
        taken = []
        for group in range(self.num_groups):
            new = self.pool.take(len(requests))
            for request, block_id in zip(requests, new, strict=True):
                request.blocks[group].append(block_id)
            taken.append(new)
        return taken

    def release(self, request: Request) -> None:
        """Gives all blocks back; the end of the chain is recycled first, so that shorter prefixes live longer."""
        self.settle()
        if self.cross is not None:
            self.cross.release(request)
        if self.num_groups == 1:
            blocks = request.blocks[0]
            self.pool.release(reversed(blocks[request.first_kept[0] :] if self._letting_go else blocks))
        else:
            chain = (block for at in zip(*request.blocks, strict=True) for block in at if block != NULL_BLOCK)
            self.pool.release(reversed(list(chain)))
        request.blocks = [[] for _ in self._groups]
        request.first_kept = [0] * self.num_groups
        request.num_registered = 0

    # -- names -----------------------------------------------------------------------------------------------------

    def register(self, request: Request, tokens: Int32s, num_written: Exact) -> None:
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
            self._index.extend(digests, request.salt, tokens, full, request.marks)
        for group, blocks in enumerate(request.blocks):
            self._index.register(digests, blocks, max(first, request.first_kept[group]), full, group)
        request.num_registered = full

    def register_later(self, request: Request, tokens: Int32s, num_written: Exact) -> None:
        """``register``, at ``settle`` or when somebody looks for a prefix: the step that fills the blocks need not wait."""
        self._unnamed.append((request, tokens, num_written))

    def settle(self) -> None:
        """Name what is to be named."""
        if self._unnamed:
            for each in self._unnamed:
                self.register(*each)
            self._unnamed.clear()

    def row_end(
        self, request: Request, tokens: Int32s, start: Exact, end: Exact, known: Exact
    ) -> tuple[Exact, int | None]:
        """Where a row of known tokens over [start, end) shall end, and the slot that its states shall be copied to then:
        earlier where a checkpoint is wanted that there is not; None: they shall not be copied.

        Args:
            tokens: int32, the request's tokens, ``known`` of them.
        """
        if self.states is None or not self.may_hit(request):
            return end, None
        place = self.states.next_place(start, known, request.junction)
        while place is not None and place <= end:
            depth = place // self.block_size
            if len(request.digests) < depth:
                self._index.extend(request.digests, request.salt, tokens, depth, request.marks)
            slot = self.states.save(request.digests[depth - 1])
            if slot is not None:
                return place, slot
            place = self.states.next_place(place, known, request.junction)
        return end, None

    def forget_prefixes(self) -> None:
        """Nothing computed so far will be hit again; what requests hold stays theirs."""
        if self.states is not None:
            self.states.forget()
        self._unnamed.clear()
        self.pool.forget_names()
