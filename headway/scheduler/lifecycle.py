"""The moves of a request: waiting -> running -> (preempted -> waiting) -> draining -> finished."""

from __future__ import annotations

from headway.core.config import SchedulerConfig
from headway.core.errors import HeadwayError, InvalidRequestError
from headway.scheduler.cache.manager import Hits, KVManager
from headway.scheduler.cache.pool import NULL_BLOCK
from headway.scheduler.media import MediaPlanner
from headway.scheduler.request import Request, Status
from headway.scheduler.slots import RunningSet, SlotTable
from headway.scheduler.waiting import WaitingQueue


class Lifecycle:
    """Every open request and what it owns; the only place where slots and blocks change hands.

    Slots and blocks are given back at once, while rows of the former owner may still be in flight: steps run in order
    on one stream, so whatever a later step puts there comes after the last use.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.table = SlotTable(config.max_num_seqs, config.max_model_len)
        self.kv = KVManager(config)
        self.media = MediaPlanner(config) if config.encoder_cache_rows else None
        self.waiting = WaitingQueue()
        self.running = RunningSet(self.table)
        self.open: dict[str, Request] = {}
        self.num_draining = 0
        self.num_preemptions = 0
        self._num_admissions = 0

    def enter(self, request: Request) -> None:
        """Raises InvalidRequestError when the id is already open."""
        if request.request_id in self.open:
            raise InvalidRequestError(f"request id {request.request_id!r} is already open; ids must be unique")
        self.open[request.request_id] = request
        self.waiting.append(request)

    def admit(self, request: Request, hits: Hits) -> None:
        """The head of the queue takes a slot and starts behind its cached blocks."""
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.admitted = self._num_admissions
        self._num_admissions += 1
        self.table.open(request, hits.depth * self.kv.block_size)
        self.kv.open(request, hits)
        self.running.prefilling = request

    def preempt(self, request: Request) -> None:
        """A running request loses slot and blocks and goes back to the front of the queue."""
        self._give_back(request)
        request.status = Status.WAITING
        self.waiting.push_front(request)
        self.num_preemptions += 1

    def drain(self, request: Request) -> None:
        """All rows of a running request are launched: only results are owed."""
        self._give_back(request)
        request.status = Status.DRAINING
        self.num_draining += 1

    def finish(self, request: Request) -> None:
        """The request is over, wherever it was."""
        if request.status is Status.RUNNING:
            self._give_back(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.DRAINING:
            self.num_draining -= 1
        if self.media is not None:
            self.media.release(request)
        request.status = Status.FINISHED
        del self.open[request.request_id]

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self.table.close(request)
        if self.media is not None:
            self.media.release(request)
        self.kv.release(request)

    def check(self) -> None:
        """Raises HeadwayError when slots, blocks and requests do not add up."""
        running = self.running.requests()
        slots = [r.slot for r in running]
        if len(set(slots)) != len(slots) or len(slots) + self.table.num_free != self.table.num_slots:
            raise HeadwayError(f"slots do not add up: {len(slots)} owned, {self.table.num_free} free")
        if self.kv.states is not None:
            self.kv.states.check()
        self.kv.pool.check(
            block for r in running for held in (*r.blocks, r.cross) for block in held if block != NULL_BLOCK
        )
        if self.media is not None:
            self.media.cache.check(sum(len(each.held) for each in self.open.values()) + self.media.num_leaving)
        if len(self.open) != len(running) + len(self.waiting) + self.num_draining:
            raise HeadwayError("an open request is neither waiting, running nor draining")
