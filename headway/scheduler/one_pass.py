"""``OnePassScheduler``: the scheduler of models that cache nothing and only pool.

A text is taken whole, runs in one step and ends with it. So nothing of a request outlives its step: there are no slots to
keep, no blocks, no chunks and no preemption, and row r of every step owns slot r. What a step needs is made of all its texts
together, in arrays: of a text the host touches a few fields only.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from headway.core.config import SchedulerConfig
from headway.core.errors import HeadwayError, InvalidRequestError
from headway.core.messages import AddRequest, EngineStats, RequestUpdate, StepUpdates
from headway.core.plan import Floats, Int32s, StepPlan, StepResult, Texts
from headway.core.task import Task

NO_VECTORS: Final = "the step brought no vectors for a request that pools"
BY_TOKEN: Final = frozenset(task for task in Task if task.by_token)


class _Waiting(NamedTuple):
    """A request in the queue; its tokens as int32, and what it uploads."""

    request: AddRequest
    tokens: array[int]
    upload: int


@dataclass(slots=True)
class _Step:
    """A step in flight, by row."""

    requests: list[AddRequest]
    ids: list[str]
    lens: Int32s


class OnePassScheduler:
    """As ``Scheduler``, see there for what the methods promise.

    Args:
        upload_ints: int32 values that admitting a request sends.
        columns: [start, end) of a token's vector that each task by token wants; others want all.
    """

    width = 1

    def __init__(
        self,
        config: SchedulerConfig,
        upload_ints: Callable[[AddRequest], int],
        columns: Mapping[Task, tuple[int, int]] | None = None,
    ) -> None:
        self._config, self._upload_ints, self._columns = config, upload_ints, columns or {}
        self._open: dict[str, AddRequest] = {}
        self._waiting: deque[_Waiting] = deque()
        """In order of arrival. Those that are not in ``_open`` any more were aborted."""
        self._launched: dict[int, _Step] = {}
        self._next_step = 0
        self._prompt_tokens = 0
        self._slots = np.arange(config.max_num_seqs, dtype=np.int32)
        self._starts = np.zeros(config.max_num_seqs, np.int32)
        self._samples = np.ones(config.max_num_seqs, np.bool_)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Raises InvalidRequestError: its id is open, it is empty or too long, it does not pool, or it brings media."""
        length = len(message.prompt_token_ids)
        if not message.task.pools:
            raise InvalidRequestError(
                f"this engine serves requests that pool, such as embeddings, not the task {message.task.value!r}",
                "task",
            )
        if not 0 < length <= self._config.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {length} tokens; 1 to {self._config.max_model_len} are possible", "prompt"
            )
        if message.media or message.runs:
            raise InvalidRequestError("this model reads texts only; leave the media out", "media")
        if message.request_id in self._open:
            raise InvalidRequestError(f"request id {message.request_id!r} is already open; ids must be unique")
        upload = self._upload_ints(message)
        if upload > self._config.max_upload_ints:
            raise InvalidRequestError(
                f"the request has to send {upload} values in one step, which carries {self._config.max_upload_ints}; "
                "shorten the prompt"
            )
        tokens = array("i", message.prompt_token_ids)  # here, where an id that is no int32 fails its own request alone
        self._open[message.request_id] = message
        self._waiting.append(_Waiting(message, tokens, upload))

    def abort(self, request_id: str) -> bool:
        return self._open.pop(request_id, None) is not None

    def fail(self, request_id: str, message: str) -> RequestUpdate | None:
        return _failure(request_id, message) if self.abort(request_id) else None

    def provide_mask(self, request_id: str, mask: Int32s) -> None:
        """Nothing is drawn here."""

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """See ``Scheduler``."""
        taken = self._take()
        if not taken:
            return None
        taken.sort(key=_length, reverse=True)  # equal lengths side by side, and the longest begin first
        requests, tokens = [each.request for each in taken], [each.tokens for each in taken]
        lens = np.array([len(each) for each in tokens], np.int32)
        count = len(requests)
        plan = StepPlan(self._next_step, self._slots[:count], lens, self._starts[:count], self._samples[:count], 0)
        plan.pools, plan.owners = True, requests
        plan.token_vectors = not BY_TOKEN.isdisjoint([each.task for each in requests])
        ids = [each.request_id for each in requests]
        plan.texts = Texts(
            ids,
            np.frombuffer(b"".join(tokens), np.int32),
            np.array([each.pool_start for each in requests], np.int32),
            np.array([each.raw for each in requests], np.int32),
            np.array([each.token_type_range for each in requests], np.int32),
            np.array([each.adapter for each in requests], np.int32),
        )
        self._launched[plan.step] = _Step(requests, ids, lens)
        self._next_step += 1
        return plan

    def _take(self) -> list[_Waiting]:
        """The first that wait, as many as fit into a step."""
        config, waiting, still_open = self._config, self._waiting, self._open.get
        tokens, uploads, room = config.max_num_batched_tokens, config.max_upload_ints, config.max_num_seqs
        found: list[_Waiting] = []
        while waiting and len(found) < room:
            first = waiting[0]
            if still_open(first.request.request_id) is first.request:
                tokens -= len(first.tokens)
                uploads -= first.upload
                if tokens < 0 or uploads < 0:
                    break
                found.append(first)
            waiting.popleft()
        return found

    def apply(self, plan: StepPlan, result: StepResult) -> StepUpdates:
        if next(iter(self._launched), None) != plan.step:
            raise HeadwayError(f"step {plan.step} is not the oldest in flight; results are applied in order")
        step, still_open = self._launched.pop(plan.step), self._open
        pairs = zip(step.ids, step.requests, strict=True)
        rows = [row for row, (name, request) in enumerate(pairs) if still_open.get(name) is request]
        for row in rows:
            del still_open[step.ids[row]]
        if plan.token_vectors or result.vectors is None:
            updates = StepUpdates()
            updates.add(self._one_by_one(step, rows, result))
            return updates
        whole = len(rows) == len(step.ids)
        self._prompt_tokens += int((step.lens if whole else step.lens[rows]).sum())
        vectors: Floats = result.vectors if whole else result.vectors[rows]
        ids = step.ids if whole else [step.ids[row] for row in rows]
        return StepUpdates(ids, [0] * len(ids), {}, vectors.tobytes(), vectors.shape[1] if ids else 0)

    def _one_by_one(self, step: _Step, rows: list[int], result: StepResult) -> list[RequestUpdate]:
        """Updates of a step in which some row wants its tokens' vectors, or which brought none."""
        updates, ends = [], step.lens.cumsum().tolist()
        for row in rows:
            request = step.requests[row]
            vectors = None if result.vectors is None else result.vectors[row]
            if request.task.by_token:
                start = ends[row] - len(request.prompt_token_ids) + request.pool_start
                first, last = self._columns.get(request.task, (0, None))
                vectors = None if result.token_vectors is None else result.token_vectors[start : ends[row], first:last]
            if vectors is None:
                updates.append(_failure(request.request_id, NO_VECTORS))
                continue
            self._prompt_tokens += len(request.prompt_token_ids)
            update = RequestUpdate(request_id=request.request_id, new_token_ids=[], finish_reason="stop")
            update.pooled = vectors.tobytes()
            updates.append(update)
        return updates

    def discard(self, plan: StepPlan, message: str) -> list[RequestUpdate]:
        """See ``Scheduler``."""
        if next(reversed(self._launched), None) != plan.step:
            raise HeadwayError(f"step {plan.step} is not the newest in flight; only that one can be discarded")
        step = self._launched.pop(plan.step)
        mine = [name for name, each in zip(step.ids, step.requests, strict=True) if self._open.get(name) is each]
        return [update for name in mine if (update := self.fail(name, message)) is not None]

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._launched)

    def has_unfinished(self) -> bool:
        return bool(self._open)

    def stats(self) -> EngineStats:
        """See ``Scheduler``."""
        waiting = sum(self._open.get(each.request.request_id) is each.request for each in self._waiting)
        return EngineStats(
            num_running=len(self._open) - waiting,
            num_waiting=waiting,
            num_steps=self._next_step,
            prompt_tokens=self._prompt_tokens,
        )

    def check_integrity(self) -> None:
        """See ``Scheduler``."""
        known = [each.request for each in self._waiting] + [
            r for step in self._launched.values() for r in step.requests
        ]
        lost = self._open.keys() - {each.request_id for each in known}
        if lost:
            raise HeadwayError(f"{len(lost)} open requests neither wait nor run")


def _length(waiting: _Waiting) -> int:
    return len(waiting.tokens)


def _failure(request_id: str, message: str) -> RequestUpdate:
    return RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason="error", error=message)
