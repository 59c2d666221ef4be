"""Open requests that pool. One call's prompts are one group: it is looked at once, when all of its vectors are there."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

import numpy as np
import numpy.typing as npt

from headway.api.pooling.door import TOKEN_TASKS, Wanted
from headway.api.request_metrics import RequestMetrics
from headway.core.errors import InvalidRequestError, RequestFailedError
from headway.core.messages import AddRequest, PooledBatch, RequestUpdate, Update
from headway.core.pooling import PoolingInfo
from headway.core.task import Task

Floats = npt.NDArray[np.float32]
NO_VECTOR = np.empty(0, np.float32)


class OpenPooling:
    """Some prompts that want the same.

    Attributes:
        request_id: what the caller knows it by; need not be unique.
        messages: one for each prompt, in order.
        vectors: float32 of each prompt, flat, as they came: views of what the engine sent.
        arrived: when the caller asked, monotonic seconds.
        error, error_parameter: of the first prompt that failed; None while none did.
        aborted: it was dropped before its end.
        trace: whatever the metrics' observer gave for it.
        queue_seconds: that a prompt of it waited for its first step at most; None while nothing is known.
    """

    def __init__(self, request_id: str, messages: list[AddRequest], wanted: Wanted) -> None:
        self.request_id, self.messages, self.wanted = request_id, messages, wanted
        self.vectors: list[Floats] = [NO_VECTOR] * len(messages)
        self.cached = [0] * len(messages)
        self.arrived = monotonic()
        self.num_unfinished = len(messages)
        self.error: str | None = None
        self.error_parameter: str | None = None
        self.aborted = False
        self.trace: object = None
        self.queue_seconds: float | None = None

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all of it."""
        return sum(len(message.prompt_token_ids) for message in self.messages)

    def take(self, place: int, update: RequestUpdate) -> None:
        """The end of one prompt."""
        if update.queue_seconds is not None:
            self.queue_seconds = max(self.queue_seconds or 0.0, update.queue_seconds)
        if update.error is not None or update.pooled is None:
            if self.error is None:
                self.error = update.error or f"the request ended with {update.finish_reason!r} and without a vector"
                self.error_parameter = update.error_parameter
        else:
            self.vectors[place] = np.frombuffer(update.pooled, np.float32)
            self.cached[place] = update.num_cached_tokens

    def check(self) -> None:
        """Raises InvalidRequestError or RequestFailedError if a prompt failed, or somebody aborted it."""
        if self.error is not None:
            if self.error_parameter is not None:
                raise InvalidRequestError(self.error, self.error_parameter)
            raise RequestFailedError(self.error)
        if self.aborted:
            raise RequestFailedError("the request was aborted")

    def arrays(self, pooling: PoolingInfo) -> list[Floats]:
        """What each prompt gets: float32 [width], or by token [tokens, width]; cut and normalised. May be read-only."""
        arrays = finished_vectors(self.vectors, self.wanted, pooling)
        if self.wanted.columns or self.wanted.step_tag_id is not None:
            pairs = zip(arrays, self.messages, strict=True)
            arrays = [_steps(rows, message.prompt_token_ids, self.wanted) for rows, message in pairs]
        return arrays


def finished_vectors(vectors: list[Floats], wanted: Wanted, pooling: PoolingInfo) -> list[Floats]:
    """Vectors as they came, cut to ``dimensions`` and made of length 1 where that is left to do here."""
    if not vectors:
        return []
    if wanted.task in TOKEN_TASKS:
        width = pooling.width_by_token(wanted.task)
        vectors = [vector.reshape(-1, width) for vector in vectors]
    if wanted.dimensions is None and not wanted.normalize:
        return vectors  # nothing is copied: the engine's own bytes, which nobody may write
    if wanted.task in TOKEN_TASKS:
        return [_finished(each, wanted) for each in vectors]
    return list(_finished(np.stack(vectors), wanted))


def _finished(rows: Floats, wanted: Wanted) -> Floats:
    if wanted.dimensions is not None:
        rows = rows[:, : wanted.dimensions]
    return normalized(rows) if wanted.normalize else rows


def _steps(rows: Floats, ids: list[int], wanted: Wanted) -> Floats:
    """What a process reward model says of the steps that end at its tags: [steps, columns]. ``rows``: of the last tokens."""
    if wanted.columns:
        rows = _activated(rows[:, list(wanted.columns)], wanted.activation)
    if wanted.step_tag_id is not None:
        rows = rows[np.asarray(ids[len(ids) - len(rows) :]) == wanted.step_tag_id]
    return rows


def _activated(rows: Floats, activation: str) -> Floats:
    if activation == "sigmoid":
        return np.reciprocal(1 + np.exp(-rows), dtype=np.float32)
    if activation == "softmax":
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    return rows


def normalized(rows: Floats) -> Floats:
    """Rows of Euclidean length 1, in float32; rows of zeros stay (as torch's ``normalize`` with its eps of 1e-12)."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float32))
    return rows / np.maximum(length, np.float32(1e-12))[:, None]


def _measured(group: OpenPooling, place: int, now: float) -> tuple[Task, int, float]:
    """Task, tokens, seconds since its arrival."""
    return group.wanted.task, len(group.messages[place].prompt_token_ids), now - group.arrived


class PoolingProcessor:
    """Keeps the open groups and routes updates to them. Not thread-safe: one thread (or event loop) owns it.

    Args:
        metrics: where requests are measured; None measures nothing.
    """

    def __init__(self, metrics: RequestMetrics | None = None) -> None:
        self._metrics = metrics
        self._open: dict[str, tuple[OpenPooling, int]] = {}

    def open(self, messages: list[AddRequest], wanted: Wanted, request_id: str) -> OpenPooling:
        """Begin to follow a group."""
        group = OpenPooling(request_id, messages, wanted)
        self._open.update({message.request_id: (group, place) for place, message in enumerate(messages)})
        if self._metrics is not None and self._metrics.observer is not None:
            group.trace = self._metrics.observer.opened()
        return group

    def requests(self) -> list[OpenPooling]:
        """Every group with a running prompt."""
        return list({id(group): group for group, _ in self._open.values()}.values())

    def apply(self, updates: Iterable[Update]) -> tuple[list[OpenPooling], list[str]]:
        """Take updates; those of prompts no longer followed are ignored.

        Returns:
            (groups that changed, nothing: no prompt has to be aborted for what it brought).
        """
        touched: dict[int, OpenPooling] = {}
        now = monotonic()
        for update in updates:
            if isinstance(update, PooledBatch):
                self._take_batch(update, touched, now)
                continue
            if update.finish_reason is None:
                continue
            group, place = self._open.pop(update.request_id, (None, 0))
            if group is None:
                continue
            group.take(place, update)
            group.num_unfinished -= 1
            touched[id(group)] = group
            if self._metrics is not None:
                reason = "error" if update.error is not None else "stop"
                self._metrics.pooled(*_measured(group, place, now), update.queue_seconds, reason)
                self._ended(group, now)
        return list(touched.values()), []

    def _take_batch(self, batch: PooledBatch, touched: dict[int, OpenPooling], now: float) -> None:
        """The vectors of one step: the rows of one array."""
        vectors = np.frombuffer(batch.vectors, np.float32).reshape(-1, batch.width)
        pop, nobody, last = self._open.pop, (None, 0), None
        seconds = batch.queue_seconds or [None] * len(vectors)
        for name, vector, queued in zip(batch.request_ids, vectors, seconds, strict=True):
            group, place = pop(name, nobody)
            if group is None:
                continue
            group.vectors[place] = vector
            group.num_unfinished -= 1
            if group is not last:
                touched[id(group)] = last = group
            if queued is not None and queued > (group.queue_seconds or 0.0):
                group.queue_seconds = queued
            if self._metrics is not None:
                self._metrics.pooled(*_measured(group, place, now), queued, "stop")
                self._ended(group, now)

    def drop(self, group: OpenPooling) -> list[str]:
        """Stop following a group. Returns the ids to abort in the engine."""
        if group.finished:
            return []
        ids = [message.request_id for message in group.messages if message.request_id in self._open]
        now = monotonic()
        for name in ids:
            _, place = self._open.pop(name)
            if self._metrics is not None:
                tokens = len(group.messages[place].prompt_token_ids)
                self._metrics.pooled(group.wanted.task, tokens, now - group.arrived, None, "abort")
        group.num_unfinished, group.aborted = 0, True
        self._ended(group, now)
        return ids

    def _ended(self, group: OpenPooling, now: float) -> None:
        if group.finished and self._metrics is not None and self._metrics.observer is not None:
            self._metrics.observer.ended(group, now)
