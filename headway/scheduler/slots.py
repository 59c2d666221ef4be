"""Per-slot host tables, one numpy array per field: a steady decode step touches them with whole-batch operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.core.plan import Int32s
from headway.scheduler.request import Request

Int64s = npt.NDArray[np.int64]


class SlotTable:
    """S slots of L tokens.

    Attributes (S entries each):
        scheduled: tokens whose rows have been scheduled = position of the next row. A bound on the device's count: a row of
            drafts counts whole until its result says how many were accepted.
        least: the device's count when all scheduled rows have run and every draft was rejected. Below it only where a
            request has ended. Kept up to date where there are drafts; elsewhere it would equal ``scheduled``.
        known: tokens whose value the host knows, prompt included.
        last: ``scheduled`` at which nothing is left to schedule (prompt + max_tokens - 1).
        capacity: tokens the held blocks can store.
        in_flight: rows launched and not applied, of the present owner.
        epoch: how often the slot changed hands; a row launched under an older epoch is not the present owner's.
        drafts: tokens may be guessed ahead for the owner.
        special: the next update of the owner carries more than a token.
        history: int32 [S, L], known tokens.
        num_closed: how often any slot changed hands.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.scheduled = np.zeros(num_slots, np.int32)
        self.least = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.last = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.in_flight = np.zeros(num_slots, np.int32)
        self.epoch = np.zeros(num_slots, np.int64)
        self.drafts = np.zeros(num_slots, np.bool_)
        self.special = np.zeros(num_slots, np.bool_)
        self.history: Int32s = np.zeros((num_slots, max_model_len), np.int32)
        self.num_closed = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lengths(self, index: Int64s, width: int) -> Int32s:
        """int32 [R], tokens of these slots' decode rows where those with drafts have ``width``."""
        return np.where(self.drafts[index], width, 1).astype(np.int32)

    def open(self, request: Request, num_computed: int) -> int:
        """Hands a free slot to the request; returns it."""
        slot = self._free.pop()
        known = len(request.tokens)
        self.scheduled[slot] = self.least[slot] = num_computed
        self.known[slot] = known
        self.last[slot] = request.max_total - 1
        self.capacity[slot] = 0
        self.in_flight[slot] = 0
        self.drafts[slot] = request.drafts
        self.special[slot] = request.says_more or not request.reported
        self.history[slot, :known] = request.tokens
        request.slot = slot
        return slot

    def close(self, request: Request) -> None:
        """Takes the slot back; what only the slot knew moves to the request."""
        slot = request.slot
        request.tokens = self.history[slot, : self.known[slot]].copy()
        request.in_flight = int(self.in_flight[slot])
        request.slot = -1
        self.drafts[slot] = False
        self.epoch[slot] += 1
        self.num_closed += 1
        self._free.append(slot)


@dataclass(slots=True, frozen=True)
class Rows:
    """The same rows four ways.

    Attributes:
        slots: int32 [R].
        index: int64 [R], the same numbers (numpy indexes with these without converting).
        epochs: int64 [R], epoch of each slot when the rows were chosen.
        num_closed: the table's, then.
        requests: R owners.
        ids: R request ids.
    """

    slots: Int32s
    index: Int64s
    epochs: Int64s
    num_closed: int
    requests: list[Request]
    ids: list[str]

    @classmethod
    def of(cls, requests: list[Request], table: SlotTable) -> Rows:
        index = np.array([r.slot for r in requests], np.int64)
        ids = [r.request_id for r in requests]
        return cls(index.astype(np.int32), index, table.epoch[index], table.num_closed, requests, ids)

    def __len__(self) -> int:
        return len(self.requests)

    def first(self, n: int) -> Rows:
        if n >= len(self.requests):
            return self
        return Rows(self.slots[:n], self.index[:n], self.epochs[:n], self.num_closed, self.requests[:n], self.ids[:n])

    def picked(self, order: Int64s) -> Rows:
        """Row ``order[i]`` of these at place i."""
        places = order.tolist()
        requests, ids = [self.requests[i] for i in places], [self.ids[i] for i in places]
        return Rows(self.slots[order], self.index[order], self.epochs[order], self.num_closed, requests, ids)

    def plus(self, other: Rows) -> Rows:
        """These rows, then ``other``'s."""
        return Rows(
            np.concatenate((self.slots, other.slots)),
            np.concatenate((self.index, other.index)),
            np.concatenate((self.epochs, other.epochs)),
            min(self.num_closed, other.num_closed),
            self.requests + other.requests,
            self.ids + other.ids,
        )


class RunningSet:
    """Requests that own slots, in order of arrival: decoding ones, then at most one still inside its known tokens. Those that
    lag (they decode whenever their mask has come) are kept apart, as are those that pool and whose last row is planned: they
    hold what they have until the plan is whole.

    A second one cannot start before the first is through (first come first served: it takes the whole budget or
    ends), so appending keeps the order.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._decoding: list[Request] = []
        self.lagging: list[Request] = []
        self._pooled: list[Request] = []
        self._rows: Rows | None = None
        self._longest_first: tuple[Rows, Int64s] | None = None
        self.prefilling: Request | None = None

    def __len__(self) -> int:
        return len(self._decoding) + len(self.lagging) + len(self._pooled) + (self.prefilling is not None)

    @property
    def newest(self) -> Request:
        """The most recently admitted request."""
        if self.prefilling or not (self.lagging or self._pooled):
            return self.prefilling or self._decoding[-1]
        kinds = (self._decoding, self.lagging, self._pooled)
        return max((each[-1] for each in kinds if each), key=lambda request: request.admitted)

    def requests(self) -> list[Request]:
        last = [self.prefilling] if self.prefilling else []
        return sorted(self._decoding + self.lagging + self._pooled + last, key=lambda request: request.admitted)

    def decode_rows(self) -> Rows:
        """The decoding requests, rebuilt only after a change; never modified, so plans may share it."""
        if self._rows is None:
            self._rows = Rows.of(list(self._decoding), self._table)
        return self._rows

    def longest_first(self) -> tuple[Rows, Int64s]:
        """``decode_rows`` by falling length, and which of them each is, int64 [R]; rebuilt only after a change, since rows that
        decode grow alike.

        Attention is handed rows in this order: a long row that begins last runs on while the rest of the device is idle (256
        rows of 100 to 1024 tokens, Qwen3-0.6B on one H200: 143 us in order of arrival, 132 so).
        """
        rows = self.decode_rows()
        if self._longest_first is None:
            order = np.argsort(-self._table.scheduled[rows.index], kind="stable")
            self._longest_first = (rows.picked(order), order)
        return self._longest_first

    def add_decoding(self, request: Request) -> None:
        """The request is past its known tokens."""
        if request.pools:
            self._pooled.append(request)
            return
        if request.lags:
            self.lagging.append(request)
            return
        self._decoding.append(request)
        self._rows = self._longest_first = None

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the set."""
        if request is self.prefilling:
            self.prefilling = None
        elif request.lags:
            self.lagging.remove(request)
        elif request.pools:
            self._pooled.remove(request)
        else:
            self._decoding.remove(request)
            self._rows = self._longest_first = None
