"""What stands between one engine and an event loop: updates come from the engine's thread, prompts go in bundles."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from headway.api.output_processor import OpenRequest
from headway.api.pooling.requests import OpenPooling
from headway.core.errors import EngineDeadError
from headway.core.messages import AddRequest, Update
from headway.engine.client import EngineClient

SENT_AT_ONCE = 32
"""Prompts that the engine is sent without waiting for those which other callers open in the same turn of the event loop."""
WOKEN_AT_ONCE = 16
"""Consumers that run between two looks of the event loop at its sockets. A new request takes some ten of them until its first
token is sent, each of which would last as long as it takes to write to all streams."""

Open = OpenRequest | OpenPooling


class Processor(Protocol):
    """What the hub needs of an OutputProcessor, or of a PoolingProcessor."""

    def apply(self, updates: list[Any], /) -> tuple[Sequence[Open], list[str]]: ...
    def requests(self) -> Sequence[Open]: ...
    def drop(self, request: Any, /) -> list[str]: ...


class Hub:
    """Carries updates from the engine to the event loop. Its thread waits in ``client.poll``; all else is the loop's.

    Knows nothing of the AsyncLLM, so that the thread does not keep that alive.
    """

    def __init__(self, client: EngineClient, processor: Processor) -> None:
        self.client = client
        self.processor = processor
        self.dead: EngineDeadError | None = None
        self.heard = monotonic()
        self._events: dict[int, asyncio.Event] = {}
        self._quiet: set[int] = set()
        self._died: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._inbox: list[Update] = []
        self._called = False
        self._outbox: list[AddRequest] = []
        """Prompts that the engine is told of when the loop's turn is over; of the loop alone, as what follows."""
        self._news: dict[int, Open] = {}
        """Requests whose consumers are to be woken, by id()."""
        self._waking = False
        """The loop will call ``_wake_some`` in its next turn; until then nobody else wakes consumers."""
        self._thread = threading.Thread(target=self._pump, name="headway-updates", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        while True:
            try:
                updates = self.client.poll()
                self.heard = monotonic()
            except EngineDeadError as error:
                self.dead = error
                self._call_loop(self._wake_all)
                return
            with self._lock:
                self._inbox += updates
                call = bool(self._inbox) and not self._called
                self._called = self._called or call
            if call:
                self._call_loop(self._deliver)

    def _call_loop(self, function: Callable[[], None]) -> None:
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(function)
                return
        except RuntimeError:
            pass
        with self._lock:  # no loop, or a closed one: nobody waits
            self._inbox.clear()
            self._called = False

    def _deliver(self) -> None:
        with self._lock:
            updates, self._inbox = self._inbox, []
            self._called = False
        touched, aborts = self.processor.apply(updates)
        if aborts:
            self.abort_in_engine(aborts)
        self._news |= {id(each): each for each in touched if each.finished or id(each) not in self._quiet}
        if not self._waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake the next consumers; then, before the others, let the loop look at its sockets.

        Called once more after the last of them, so that updates which arrive in their turn wait for the next.
        """
        next_keys = list(itertools.islice(self._news, WOKEN_AT_ONCE))
        for key in next_keys:
            self.wake(self._news.pop(key))
        self._waking = bool(next_keys)
        if self._waking and self._loop is not None:
            self._loop.call_soon(self._wake_some)

    def _wake_all(self) -> None:
        if self._died is not None:
            self._died.set()
        for event in self._events.values():
            event.set()

    def wake(self, request: Open) -> None:
        event = self._events.get(id(request))
        if event is not None:
            event.set()

    def attach(self) -> None:
        """Make the running loop the one updates go to; another loop may take over when no request is open."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._events:
            raise RuntimeError("this AsyncLLM is in use on another event loop; make one per loop")
        self._events.clear()
        self._quiet.clear()
        self._news.clear()
        self._outbox.clear()
        self._died = None
        for request in self.processor.requests():
            self.abort_in_engine(self.processor.drop(request))
        self._loop = loop

    def open(self, request: Open, only_final: bool) -> asyncio.Event:
        """Begin to wake a consumer, by the event that this returns. ``only_final``: when all is finished, and not before."""
        event = self._events[id(request)] = asyncio.Event()
        if only_final:
            self._quiet.add(id(request))
        return event

    def add(self, requests: list[AddRequest]) -> None:
        """Give prompts to the engine, in one message with those of others that come in the same turn of the loop.

        A message for each takes an eighth more processor time of server and engine, where requests are short. Where the engine
        is found dead, waiting consumers are woken, as for any death.
        """
        if not self._outbox and self._loop is not None:
            self._loop.call_soon(self._send)
        self._outbox += requests
        if len(self._outbox) >= SENT_AT_ONCE:
            self._send()

    def _send(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests and self.dead is None:
            try:
                self.client.add(requests)
            except EngineDeadError as error:
                self.dead = error
        if requests and self.dead is not None:
            self._wake_all()

    async def wait_dead(self) -> EngineDeadError:
        """Sleep until the engine has stopped, and say why."""
        self.attach()
        if self._died is None:
            self._died = asyncio.Event()
        while self.dead is None:
            await self._died.wait()
        return self.dead

    def leave(self, request: Open) -> None:
        """The consumer has gone: abort what still runs."""
        self._events.pop(id(request), None)
        self._quiet.discard(id(request))
        self.abort_in_engine(self.processor.drop(request))

    def abort_in_engine(self, ids: list[str]) -> None:
        """Stop prompts; nothing is raised where the engine is gone."""
        if ids:
            self._send()  # an engine that hears of an end before the beginning would compute for nobody
        if ids and self.dead is None:
            try:
                self.client.abort(ids)
            except EngineDeadError as error:
                self.dead = error

    def close(self) -> None:
        self.client.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
