"""Where the server stands between its first and its last request, and how much it holds."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final

from headway.server.errors import ApiError, refuse

ALIVE: Final = {"status": "alive"}
"""What /live says, in every phase."""


class Phase(Enum):
    """STARTING: the port answers, the model loads. READY. DRAINING: what runs may finish. DEAD: the engine is gone."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Lifecycle:
    """Counts of one server. Belongs to the event loop's thread.

    Attributes:
        phase: see ``Phase``.
        num_requests: POST requests being answered.
        num_sequences: completions, or texts to a model that pools, asked for and not yet finished.
        capacity: most of them at once; set when the model is loaded.
    """

    def __init__(self, phase: Phase = Phase.STARTING) -> None:
        self.phase = phase
        self.num_requests = 0
        self.num_sequences = 0
        self.capacity = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request has begun."""
        self.num_requests += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request has been answered."""
        self.num_requests -= 1
        if self.num_requests == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def admit(self, count: int, what: str = "completions", param: str = "n") -> None:
        """Take room for ``count`` completions; ``release`` gives it back. Raises ApiError when there is none (429).

        Args:
            what: what they are, for messages.
            param: the request's field with their number.
        """
        if count > self.capacity:
            fewer = "fewer prompts or a smaller n" if param == "n" else f"fewer {what}"
            raise refuse(
                f"{count} {what} in one request can never be admitted: this server holds {self.capacity} "
                f"(max_num_seqs + --max-queue); send {fewer}",
                param,
            )
        if self.num_sequences + count > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.num_sequences} {what} are running or waiting, "
                f"{self.capacity} is the limit; try again later",
                None,
                "queue_full",
                {"Retry-After": "1"},
            )
        self.num_sequences += count

    def release(self, count: int) -> None:
        """See ``admit``."""
        self.num_sequences -= count
