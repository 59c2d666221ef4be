"""Pictures in prompts: how far a row may go, what is encoded for it, and where its features lie.

A picture is encoded ahead of the first row that reads it, unless the cache has it. Encoders take time that rows which decode
wait for, so a step has a budget of them (``Passes``); a row then ends before the first picture whose features are still to
come. Tokens that see later ones stay together: a row ends before such a run or behind it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from headway.core.config import SchedulerConfig
from headway.core.encode import EncodeJob, MediaRun
from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.scheduler.cache.encoder import EncoderCache, Range
from headway.scheduler.passes import Passes
from headway.scheduler.request import Request

Mark = tuple[int, int, bytes]
"""Positions [start, end) that mean more than their tokens, and what."""


class MediaPlanner:
    """Attributes:
    cache: who has which rows.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cache = EncoderCache(config.encoder_cache_rows)
        self._sees, self._whole = config.sees, config.longest_whole
        self._passes, self._most_tokens = Passes(config), config.media_tokens
        self._beside_decode = False
        self._awaiting: Request | None = None  # waits in the queue, and holds pictures
        self._leaving: list[object] = []

    def begin(self, beside_decode: bool) -> None:
        """A new step; ``beside_decode``: some of its rows decode, and shall not wait long."""
        self._passes.begin(beside_decode)
        self._beside_decode = beside_decode
        for name in self._leaving:
            self._let_go(name)
        self._leaving = []

    @property
    def encodes(self) -> list[EncodeJob]:
        """Jobs of the step that is planned."""
        return self._passes.jobs

    def check(self, message: AddRequest) -> None:
        """Raises InvalidRequestError: runs and features do not fit together, or can never be read."""
        runs, items, end = message.runs, message.media, 0
        rows = [0] * len(items)
        for run in runs:
            if not 0 <= run.item < len(items) or not end <= run.start < run.end <= len(message.prompt_token_ids):
                raise InvalidRequestError("placeholders of media overlap or lie outside the prompt", "media")
            if run.first != rows[run.item]:
                raise InvalidRequestError("placeholders of a medium are out of order", "media")
            rows[run.item] += run.end - run.start
            end = run.end
        for item, count in zip(items, rows, strict=True):
            if item.rows != count:
                raise InvalidRequestError(
                    f"a picture or recording has {item.rows} features and {count} placeholders", "media"
                )
        needed = sum(item.rows for item in items) if self._sees == "prompt" else max((i.rows for i in items), default=0)
        if needed > self.cache.num_rows:
            raise InvalidRequestError(
                f"the encoder cache has {self.cache.num_rows} rows, and the pictures and recordings need {needed} at once; "
                "send fewer or smaller ones",
                "media",
            )
        longest = max((end - start for start, end in self._wholes(message)), default=0)
        if self._whole and longest > self._whole:
            raise InvalidRequestError(
                f"{longest} tokens see each other and must be computed in one step, which has room for {self._whole}; "
                "shorten the prompt, or raise max_num_batched_tokens",
                "prompt",
            )

    def marks(self, message: AddRequest) -> list[Mark]:
        """What names blocks of keys beside their tokens: which picture a placeholder is of, and, where tokens see later ones,
        all that they see."""
        found = [
            (run.start, run.end, b"%s@%d+%d" % (message.media[run.item].key, run.first, run.late))
            for run in message.runs
        ]
        if self._sees == "prompt":
            tokens = np.asarray(message.prompt_token_ids, np.int32).tobytes()
            whole = blake2b(tokens + b"".join(mark for *_, mark in found), digest_size=16).digest()
            found.append((0, len(message.prompt_token_ids), whole))
        return found

    def claim(self, request: Request, start: int, end: int) -> int:
        """How far a row over [start, end) may go; what it reads is held then, and encoded in this step where it must be."""
        message = request.message
        end = self._paced(request, start, end)
        if self._sees == "prompt" and start < request.prompt_len:
            end = self._uncut(message, start, end)
            return end if end <= start or self._claim_all(request, message.runs) else start
        end = self._uncut(message, start, end)
        for run in message.runs:
            if run.end <= start or run.start >= end:
                continue
            if not self._claim_all(request, [run]):
                return max(run.start, start)
        return end

    def rows_of(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """(run, row of its first token's features) of the runs that a row over [start, end) reads."""
        return [
            (number, request.held[run.item].start + run.first)
            for number, run in enumerate(request.message.runs)
            if run.end > start and run.start < end
        ]

    def touches(self, request: Request, start: int, end: int) -> bool:
        """Whether the row's tokens are more than ids behind each other."""
        if self._sees == "prompt" and start < request.prompt_len:
            return True
        return any(run.end > start and run.start < end for run in request.message.runs)

    def passed(self, request: Request, end: int) -> None:
        """The row up to ``end`` is planned: pictures that lie before are not read again."""
        behind = {run.item for run in request.message.runs if run.end > end}
        for item in [each for each in request.held if each not in behind]:
            # Not within this step: its encoders run ahead of its rows, and would write there.
            del request.held[item]
            self._leaving.append(self._name(request, item))

    def release(self, request: Request) -> None:
        """The request reads nothing more, or begins anew."""
        for item in list(request.held):
            self._release(request, item)

    def keeps(self, request: Request) -> bool:
        """Whether a request that waits keeps what it holds, because pictures are under way for it; else nothing is held."""
        if any(self._name(request, item) in self._passes for item in request.held):
            self._awaiting = request
            return True
        self.release(request)
        return False

    def next_is(self, head: Request | None) -> None:
        """Of requests that wait only the first one, which comes next, may hold pictures: others could need the room."""
        if self._awaiting is not None and self._awaiting is not head:
            if self._awaiting.slot < 0:
                self.release(self._awaiting)
            self._awaiting = None

    def discard(self, jobs: list[EncodeJob]) -> None:
        """These were never done: whoever still waits for them has them done anew."""
        for job in jobs:
            if self.cache.is_held(job.name):
                self._passes.ask(job)
            else:
                self._passes.drop(job.name)
                self.cache.forget(job.name)
        self._leaving = [name for name in self._leaving if name in self.cache]

    @property
    def num_leaving(self) -> int:
        """Holds that end when the next step begins."""
        return len(self._leaving)

    def _wholes(self, message: AddRequest) -> list[tuple[int, int]]:
        if self._sees == "prompt":
            return [(0, len(message.prompt_token_ids))]
        return [(run.start, run.end) for run in message.runs if run.columns] if self._sees else []

    def _paced(self, request: Request, start: int, end: int) -> int:
        """``end``, or as far as a row with pictures goes beside rows that decode: to the end of tokens that see each other."""
        paced = start + self._most_tokens
        if not self._beside_decode or not self._most_tokens or end <= paced or not self.touches(request, start, end):
            return end
        for first, past in self._wholes(request.message):
            if first < paced < past:
                return first if first > start else min(past, end)
        return paced

    def _uncut(self, message: AddRequest, start: int, end: int) -> int:
        """``end``, or where the tokens begin that it would part from others which they see."""
        for first, past in self._wholes(message):
            if first < end < past:
                return max(first, start)
        return end

    def _claim_all(self, request: Request, runs: list[MediaRun]) -> bool:
        """Hold the items of ``runs``, all or none, and encode what is not there yet; whether all are there then."""
        items = request.message.media
        wanted = list(dict.fromkeys(run.item for run in runs if run.item not in request.held))
        by_name = {self._name(request, item): items[item].rows for item in wanted}
        rows = sum(count for name, count in by_name.items() if name not in self.cache)
        if rows and rows > self._passes.rows_left and self.encodes:
            return False
        taken: list[tuple[int, Range, bool]] = []
        for item in wanted:
            name = self._name(request, item)
            found = self.cache.hold(name)
            fresh = found is None
            if found is None:
                found = self.cache.take(name, items[item].rows)
            if found is None:
                for each, _, new in reversed(taken):
                    self.cache.release(self._name(request, each))
                    if new:
                        self.cache.forget(self._name(request, each))
                return False
            taken.append((item, found, fresh))
        for item, found, fresh in taken:
            request.held[item] = found
            if fresh:
                places = np.arange(found.start, found.start + found.rows, dtype=np.int32)
                self._passes.ask(EncodeJob(request.slot, items[item], places, self._name(request, item)))
        waited = {self._name(request, run.item) for run in runs}
        if any(name in self._passes for name in waited):
            self._passes.run()
        return not any(name in self._passes for name in waited)

    def _release(self, request: Request, item: int) -> None:
        del request.held[item]
        self._let_go(self._name(request, item))

    def _let_go(self, name: object) -> None:
        """A hold ends; an item that nobody waits for is not encoded any further."""
        self.cache.release(name)
        if name in self._passes and not self.cache.is_held(name):
            self._passes.drop(name)
            self.cache.forget(name)

    def _name(self, request: Request, item: int) -> object:
        """Requests with different salts share nothing."""
        return request.message.cache_salt, request.message.media[item].key
