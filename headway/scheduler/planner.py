"""One step's rows: decode rows, then the running prefill, then admissions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headway.core.config import SchedulerConfig
from headway.core.encode import EncodeJob
from headway.core.errors import HeadwayError
from headway.core.plan import NO_INTS, Admission, Bools, Bound, Exact, Int32s, StepLimit, StepPlan
from headway.scheduler.cache.manager import BlockEdit, Hits
from headway.scheduler.lifecycle import Lifecycle
from headway.scheduler.request import Request
from headway.scheduler.slots import Int64s, Rows

MASK_EDIT_INTS = 64
"""What a mask takes of the upload beside its words, at most."""


@dataclass(slots=True)
class _Draft:
    """The plan so far. Row lists cover the rows after the decode rows."""

    tokens_left: int
    uploads_left: int
    requests: list[Request] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    drained: list[Request] = field(default_factory=list)
    masks: list[tuple[int, Int32s]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    edit_rows: list[int] = field(default_factory=list)
    edit_indices: list[int] = field(default_factory=list)
    edit_ids: list[int] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    encodes: list[EncodeJob] = field(default_factory=list)
    encoder_rows_left: int = 0
    media_rows: list[tuple[int, int, int]] = field(default_factory=list)
    media: bool = False

    def draw_masked(self, request: Request) -> None:
        """The row draws under the request's mask, which is thereby used up."""
        if request.mask is None:
            raise HeadwayError(f"{request.request_id} would draw before its grammar has seen the last token")
        self.masks.append((request.slot, request.mask))
        request.mask = None

    def edit(self, row: int, first_index: int, block_ids: list[int]) -> None:
        """``row``: of the block tables."""
        self.edit_rows += [row] * len(block_ids)
        self.edit_indices += range(first_index, first_index + len(block_ids))
        self.edit_ids += block_ids


class Planner:
    """Builds plans. First come first served: an earlier request never waits for a later one's tokens or blocks.

    Attributes:
        width: tokens of the next steps' decode rows, 1 to the configured width; those of requests without drafts have one.
    """

    def __init__(self, config: SchedulerConfig, life: Lifecycle) -> None:
        self._config = config
        self._life = life
        self._table = life.table
        self.width = config.width
        self._drafting, self._lookahead = config.width > 1, config.lookahead
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._all_true: Bools = np.ones(config.max_num_seqs, np.bool_)
        self._blocked: tuple[Request, int] | None = None
        self._drained: list[Request] = []
        self._cohorts, self._step = config.cohorts, 0
        self._drew = np.full(config.max_num_seqs, -config.cohorts, np.int64)  # the step in which each slot drew last
        self.cache_queries = 0
        self.cache_hits = 0

    def build(self, step: int, limit: StepLimit | None = None) -> tuple[StepPlan, Rows] | None:
        """The next step, within ``limit``, and its rows, or None when nothing can run now."""
        self.settle()
        self._step = step
        tokens, only_decode = limit or (self._config.max_num_batched_tokens, False)
        draft = _Draft(tokens, self._config.max_upload_ints)
        preemptions = self._life.num_preemptions
        media = self._life.media
        ready = self._reserve_lagging(draft) if self._life.running.lagging and not only_decode else []
        decode, starts = self._take_decode(draft)
        if ready and (taken := self._take_lagging(draft, ready)):
            decode, starts = self._add_lagging(draft, taken, decode, starts)
        if media is not None:
            media.begin(len(decode) > 0)
        if not only_decode:
            self._continue_prefill(draft)
        if self._life.num_preemptions == preemptions and not only_decode:
            draft.encoder_rows_left = self._config.max_encoder_rows // (4 if len(decode) else 1)
            self._admit(draft)
        if not len(decode) and not draft.requests:
            return None
        self._drained = draft.drained
        return self._assemble(step, draft, decode, starts)

    def settle(self) -> None:
        """What ``build`` left: the step it planned, which need not wait for this, is on its way.

        Requests whose last row it planned give back what they hold (not within the step: a slot or block of its own rows must
        not be handed out again), and blocks that it fills get their names.
        """
        for request in self._drained:
            self._life.drain(request)
        self._drained = []
        self._life.kv.settle()
        if self._life.kv.states is not None:
            self._life.kv.states.settle()

    # -- decode rows ---------------------------------------------------------------------------------------------

    def _take_decode(self, draft: _Draft) -> tuple[Rows, Int32s]:
        table, running, width = self._table, self._life.running, self.width
        rows = running.decode_rows().first(draft.tokens_left // width)
        if not len(rows):
            return rows, NO_INTS
        if self._cohorts > 1:
            rows = self._turn(rows)
        starts = table.scheduled[rows.index]
        if self._drafting:
            rows, starts = self._not_paused(rows, starts)
        ends = starts + (1 if width == 1 else table.lengths(rows.index, width))
        stored = ends + self._lookahead
        (short,) = (stored > table.capacity[rows.index]).nonzero()
        if len(short):
            self._trim_decode(draft, rows, short)
            count = self._grow_decode(draft, rows, short, stored)
            if count < len(rows):  # the rest were preempted, or wait for a block
                rows, starts, ends = rows.first(count), starts[:count], ends[:count]
        table.scheduled[rows.index] = ends
        table.in_flight[rows.index] += 1
        if self._drafting:  # a row brings one token for sure
            ends = table.least[rows.index] + 1
            table.least[rows.index] = ends
        for i in (ends == table.last[rows.index]).nonzero()[0].tolist():
            draft.drained.append(rows.requests[i])
        draft.tokens_left -= len(rows) * width
        if rows is running.decode_rows():  # else some were cut off, and the order of arrival says who
            rows, order = running.longest_first()
            starts = starts[order]
        return rows, starts

    def _turn(self, rows: Rows) -> Rows:
        """The rows whose turn it is: they wait for what the last stage draws, while the other stages run those of other
        turns."""
        drew = self._drew[rows.index]
        oldest = int(drew.min())
        (ready,) = (drew <= max(oldest, self._step - self._cohorts)).nonzero()
        ready = ready[: -(-len(rows) // self._cohorts)]
        rows = rows.picked(ready)
        self._drew[rows.index] = self._step
        return rows

    def _not_paused(self, rows: Rows, starts: Int32s) -> tuple[Rows, Int32s]:
        """Without rows that would have nothing left to do were all drafts in flight accepted: results tell how many were."""
        (going,) = (starts < self._table.last[rows.index]).nonzero()
        return (rows, starts) if len(going) == len(rows) else (rows.picked(going), starts[going])

    def _grow_decode(self, draft: _Draft, rows: Rows, short: Int64s, ends: Int32s) -> int:
        """Blocks for each row in ``short`` (ascending), up to ``ends``; returns how many leading rows can run.

        Victims come from the end. The last row left is not preempted for its own sake: it keeps what it has and sits
        this step out, and gives way only when an earlier request needs its blocks.
        """
        life = self._life
        num_free = life.kv.growths if self.width <= life.kv.block_size else 0
        preemptions = life.num_preemptions
        self._grow_by_one(draft, rows, short[:num_free])
        for i in short[num_free:].tolist():
            request, end = rows.requests[i], Bound(int(ends[i]))
            if request.slot < 0:  # a victim of an earlier row, and so are all after it
                break
            missing = life.kv.missing(request, end)
            while missing > life.kv.pool.num_free and life.running.newest is not request:
                life.preempt(life.running.newest)
            if missing > life.kv.pool.num_free:
                if len(life.running) == 1:
                    raise HeadwayError(f"no KV block for {request.request_id}, which runs alone: blocks were lost")
                return i
            self._grow(draft, request, end)
        if life.num_preemptions == preemptions:
            return len(rows)
        return next((i for i, request in enumerate(rows.requests) if request.slot < 0), len(rows))

    def _grow_by_one(self, draft: _Draft, rows: Rows, picked: Int64s) -> None:
        """A free block for each of the ``picked`` rows; there are enough."""
        table, kv = self._table, self._life.kv
        slots = rows.index[picked]
        capacity = table.capacity[slots]
        taken = kv.grow_by_one([rows.requests[i] for i in picked.tolist()])
        table.capacity[slots] = capacity + kv.block_size
        indices = (capacity // kv.block_size).tolist()
        for group, new in enumerate(taken):
            draft.edit_rows += (slots + group * table.num_slots).tolist()
            draft.edit_indices += indices
            draft.edit_ids += new

    def _trim_decode(self, draft: _Draft, rows: Rows, short: Int64s) -> None:
        """Rows that need a block give back those that lie behind their windows: by what is exact, not by the bound."""
        if not self._life.kv.lets_go:
            return
        exact = self._table.least if self._drafting else self._table.scheduled
        for i in short.tolist():
            request = rows.requests[i]
            self._trim(draft, request, Exact(int(exact[request.slot])))

    def _trim(self, draft: _Draft, request: Request, position: Exact) -> None:
        """Gives back what no token of the request at ``position`` or behind it reads."""
        self._edit(draft, request, self._life.kv.trim(request, position))

    def _edit(self, draft: _Draft, request: Request, edits: Iterable[BlockEdit]) -> None:
        for group, index, block_ids in edits:
            draft.edit(group * self._table.num_slots + request.slot, index, block_ids)

    # -- rows that lag -------------------------------------------------------------------------------------------

    def _reserve_lagging(self, draft: _Draft) -> list[Request]:
        """Requests whose mask has come, with room for one token more; later requests are preempted for it if need be."""
        life, ready = self._life, []
        for request in [each for each in life.running.lagging if each.mask is not None]:
            if request.slot < 0:  # a victim of an earlier one
                continue
            scheduled = int(self._table.scheduled[request.slot])
            stored = scheduled + 1 + self._lookahead
            if stored > self._table.capacity[request.slot]:
                self._trim(draft, request, Exact(scheduled))  # its last token is known
                while not life.kv.growths and life.running.newest is not request:
                    life.preempt(life.running.newest)
                if not life.kv.growths:
                    if len(life.running) == 1:
                        raise HeadwayError(f"no KV block for {request.request_id}, which runs alone: blocks were lost")
                    continue
                self._grow(draft, request, Bound(stored))
            ready.append(request)
        return ready

    def _take_lagging(self, draft: _Draft, ready: list[Request]) -> list[Request]:
        """Those of ``ready`` that still run, as far as tokens and upload reach: each gets a row of one token."""
        taken: list[Request] = []
        for request in ready:
            slot, mask = request.slot, request.mask
            if slot < 0 or mask is None:  # preempted for an earlier request
                continue
            upload = len(mask) + MASK_EDIT_INTS
            if not draft.tokens_left or (upload > draft.uploads_left and taken):
                break
            draft.tokens_left -= 1
            draft.uploads_left -= upload
            draft.draw_masked(request)
            taken.append(request)
        return taken

    def _add_lagging(self, draft: _Draft, taken: list[Request], decode: Rows, starts: Int32s) -> tuple[Rows, Int32s]:
        """Adds the rows of ``taken``, of one token each, to the decode rows."""
        table = self._table
        rows = Rows.of(taken, table)
        mine = table.scheduled[rows.index]
        table.scheduled[rows.index] = table.least[rows.index] = mine + 1
        table.in_flight[rows.index] += 1
        draft.drained += [each for each in taken if table.scheduled[each.slot] == table.last[each.slot]]
        return decode.plus(rows), np.concatenate((starts, mine))

    def _grow(self, draft: _Draft, request: Request, end: Bound) -> None:
        """Room for the request's tokens up to ``end``."""
        kv = self._life.kv
        edits = kv.grow(request, end)
        if edits:
            self._edit(draft, request, edits)
            self._table.capacity[request.slot] = kv.num_held(request) * kv.block_size

    # -- prefill rows --------------------------------------------------------------------------------------------

    def _continue_prefill(self, draft: _Draft) -> None:
        request = self._life.running.prefilling
        if request is None:
            return
        # It is the newest request: it never takes blocks from another, it takes what is left.
        start = int(self._table.scheduled[request.slot])
        self._trim(draft, request, Exact(start))
        room = self._life.kv.room(request) - self._lookahead - start
        self._prefill_row(draft, request, min(room, draft.tokens_left))

    def _prefill_row(self, draft: _Draft, request: Request, most: int) -> None:
        """Adds a row of at most ``most`` known tokens; none when that is 0."""
        table, slot = self._table, request.slot
        start, known = int(table.scheduled[slot]), int(table.known[slot])
        count = min(most, known - start)
        media = self._life.media
        if media is not None and count > 0:
            count = media.claim(request, start, start + count) - start
        if count <= 0:
            return
        kv = self._life.kv
        until = Exact(start + count)
        end, checkpoint = kv.row_end(request, table.history[slot], Exact(start), until, Exact(known))
        count = end - start
        self._grow(draft, request, Bound(end + self._lookahead))
        if checkpoint is not None:
            draft.saves.append((slot, checkpoint))
        table.scheduled[slot] = table.least[slot] = end
        table.in_flight[slot] += 1
        # Named before anyone looks: rows of this step and of later ones read these blocks after this row has written them.
        self._life.kv.register_later(request, table.history[slot], Exact(end))
        if media is not None:
            draft.media_rows += [(slot, *each) for each in media.rows_of(request, start, end)]
            draft.media = draft.media or media.touches(request, start, end)
            media.passed(request, end)
        draft.requests.append(request)
        draft.query_lens.append(count)
        draft.starts.append(start)
        draft.samples.append(end == known)
        draft.tokens_left -= count
        if end == known:
            self._drew[slot] = self._step
            self._life.running.prefilling = None
            self._life.running.add_decoding(request)
            if request.lags:
                draft.draw_masked(request)
            if end == table.last[slot] or request.pools:
                draft.drained.append(request)

    def _admit(self, draft: _Draft) -> None:
        life = self._life
        if life.media is not None:
            life.media.next_is(life.waiting.head if life.waiting else None)
        while life.waiting and self._table.num_free and draft.tokens_left and life.running.prefilling is None:
            request = life.waiting.head
            if request.in_flight or request.upload_now > draft.uploads_left or self._still_blocked(request):
                return
            if request.whole and len(request.tokens) > draft.tokens_left:
                return
            if request.lags and request.mask is None:  # it was preempted, and its grammar is at the last token
                return
            hits = life.kv.lookup(request)
            if not life.kv.fits(request, hits, others_run=len(life.running) > 0):
                self._blocked = (request, life.kv.pool.num_free)
                return
            self._blocked = None
            if not self._may_encode(draft, request, hits) or not self._may_see(draft, request, hits):
                return
            self._start(draft, request, hits)

    def _may_encode(self, draft: _Draft, request: Request, hits: Hits) -> bool:
        """Whether what the request's item takes of the encoder is left in this step; one item always is."""
        if self._life.kv.cross is None or hits.cross is not None:
            return True
        rows = sum(item.rows for item in request.message.media)
        if draft.encodes and rows > draft.encoder_rows_left:
            return False
        draft.encoder_rows_left -= rows
        return True

    def _may_see(self, draft: _Draft, request: Request, hits: Hits) -> bool:
        """Whether a first row of the request would have tokens: pictures that it begins with may have to wait."""
        media, start = self._life.media, hits.depth * self._life.kv.block_size
        if media is None:
            return True
        if media.claim(request, start, min(start + draft.tokens_left, len(request.tokens))) > start:
            return True
        media.keeps(request)
        return False

    def _still_blocked(self, request: Request) -> bool:
        """Whether nothing was freed since the request last did not fit: spares the look-up of a long prompt."""
        return self._blocked is not None and (
            self._blocked[0] is request and self._life.kv.pool.num_free <= self._blocked[1]
        )

    def _start(self, draft: _Draft, request: Request, hits: Hits) -> None:
        life = self._life
        draft.uploads_left -= request.upload_now
        cached = hits.depth * life.kv.block_size
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.cache_queries += len(request.tokens) if life.kv.may_hit(request) else 0
            self.cache_hits += cached
        life.admit(request, hits)
        if life.kv.cross is not None and hits.cross is None:
            [item] = request.message.media
            draft.encodes.append(EncodeJob(request.slot, item, life.kv.cross.take(request)))
        self._table.capacity[request.slot] = cached
        draft.admissions.append(Admission(request.slot, request.message, request.tokens, cached))
        self._edit(draft, request, life.kv.opening_edits(request))
        if hits.state >= 0:
            draft.loads.append((hits.state, request.slot))
        self._prefill_row(draft, request, draft.tokens_left)

    # -- the plan ------------------------------------------------------------------------------------------------

    def _assemble(self, step: int, draft: _Draft, decode: Rows, starts: Int32s) -> tuple[StepPlan, Rows]:
        n = len(decode)
        rows = decode
        samples = self._all_true[:n]
        query_lens = self._ones[:n] if self.width == 1 else self._table.lengths(rows.index, self.width)
        if draft.requests:
            more = Rows.of(draft.requests, self._table)
            columns = (
                np.array(draft.query_lens, np.int32),
                np.array(draft.samples, np.bool_),
                np.array(draft.starts, np.int32),
            )
            if n:
                rows = decode.plus(more)
                both = zip((query_lens, samples, starts), columns, strict=True)
                query_lens, samples, starts = (np.concatenate(pair) for pair in both)
            else:  # a prompt that is alone waits for each microsecond
                rows, (query_lens, samples, starts) = more, columns
        width = 1
        if self.width > 1 and self._table.drafts[rows.index].any():
            width = self.width
        elif self._drafting and draft.requests:  # steps with prompts have graphs and kernels of this width alone
            width = self._config.width
        edits: list[Int32s] = [NO_INTS] * 3
        if draft.edit_ids:
            edits = [np.array(each, np.int32) for each in (draft.edit_rows, draft.edit_indices, draft.edit_ids)]
        at = (step, rows.slots, query_lens, starts, samples, n)
        changes = (draft.admissions, edits[0], edits[1], edits[2], draft.masks)
        by_token = self._config.pools and any(request.by_token for request in draft.requests)
        pools = self._config.pools
        plan = StepPlan(*at, *changes, rows.requests, width, pools, by_token, draft.loads, draft.saves)
        media = self._life.media
        plan.encodes = draft.encodes if media is None else media.encodes
        plan.media_rows, plan.media = draft.media_rows, draft.media
        return plan, rows
