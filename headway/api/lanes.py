"""Work beside the event loop, in bounded pools of threads of its own: one for each kind, so that none holds up another."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headway.api.killable import Job
from headway.core.errors import BusyError, EngineDeadError

T = TypeVar("T")


class Lane:
    """A few threads. Of all that waits for one, the smallest work goes first: a flood of large ones holds up only its like.

    Belongs to one event loop at a time.

    Args:
        what: the work, for messages.
        width: threads.
        most_waiting: sizes of all waiting work together; what comes beyond that is refused.
        grace: seconds that work whose caller has gone may go on.
    """

    def __init__(self, what: str, width: int, most_waiting: int, grace: float = 0.0) -> None:
        self._what, self._most_waiting, self._grace = what, most_waiting, grace
        self._threads = ThreadPoolExecutor(width, thread_name_prefix=f"headway-{what.replace(' ', '-')}")
        self._width = self._free = width
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiting_size = 0

    async def run(self, work: Callable[[Job], T], size: int) -> T:
        """``work(job)`` in a thread. When the caller is cancelled the job is given up; its thread counts until it has ended.

        Raises:
            BusyError: too much work waits already.
            EngineDeadError: the lane is closed.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what an earlier one left behind is never told of its end
            self._loop, self._free, self._waiting = loop, self._width, []
        await self._turn(size)
        job = Job()
        try:
            future = loop.run_in_executor(self._threads, work, job)
        except BaseException as error:
            self._next()
            if isinstance(error, RuntimeError):  # closed
                raise EngineDeadError("the engine is shut down") from None
            raise
        future.add_done_callback(self._ended)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._grace and not future.done():
                timer = loop.call_later(self._grace, job.give_up)
                future.add_done_callback(lambda _: timer.cancel())
            else:
                job.give_up()
            raise

    async def _turn(self, size: int) -> None:
        """Wait for a free thread."""
        if self._free:
            self._free -= 1
            return
        if self._waiting_size + size > self._most_waiting and self._waiting:
            raise BusyError(f"too much {self._what} is waiting already; try again")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        self._waiting_size += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # the thread was ours already
            raise
        finally:
            self._waiting_size -= size

    def _ended(self, future: asyncio.Future[T]) -> None:
        if not future.cancelled():
            future.exception()  # whoever asked may have gone
        self._next()

    def _next(self) -> None:
        """A thread is free: the next in line gets it, if there is one."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        """Take no more work, and wait for what runs. Safe to call twice, and from any thread."""
        self._threads.shutdown()
