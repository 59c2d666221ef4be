"""``Turns``: two halves of a step, one of which computes while what the other sends to other ranks is under way.

Everything that is computed stays on the device's main stream, in the order in which the host queues it. What ranks exchange
goes to a stream of its own, behind an event, and the half that needs it waits, on the device, right before it goes on. For
that the host queues the halves in turns: whenever one has queued an exchange, the other goes on up to its next one.

    main     | A attention |    B attention     | A feed-forward | B feed-forward | ...
    side                   | A sums | B sums |                   | A sums | B sums |

A half is plain code that knows nothing of this, so the second has a thread of its own, and one of the two runs at a time. The
first half is always ahead, so the second finds its keys. All ranks do the same, so exchanges come in the same order everywhere,
and since all of them are on one stream, with nothing beside it, no two ranks can wait for each other. Captured in a graph the
halves are two branches, and no thread is left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

import torch

from headway.device.base import Device, DeviceError

T = TypeVar("T")
Job: TypeAlias = Callable[[], None]


class Turns:
    """Halves of steps on ``device``."""

    def __init__(self, device: Device) -> None:
        self._device, self._side = device, device.new_stream()
        self._events = [(device.new_event(), device.new_event()) for _ in range(2)]
        # One thread for all steps: a fresh one would open libraries' handles again, which a capture does not allow.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="headway-half", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)
        self._under_way: _Halves[object] | None = None

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """What both halves give; their exchanges overlap. By the thread that launches steps, on the main stream.

        Raises:
            Exception: the first of either half.
        """
        halves = _Halves[T](self._device, second)
        self._under_way = halves  # type: ignore[assignment]
        try:
            self._jobs.put(halves.follow)
            return halves.run(first)
        finally:
            self._under_way = None

    def exchange(self, collective: Callable[[], object]) -> None:
        """Queue what exchanges tensors of this device's main stream with other ranks: what follows on that stream may use them.

        Within ``run`` the other half goes on first.
        """
        halves = self._under_way
        if halves is None:
            collective()
            return
        main, side = self._device.main, self._side
        ready, done = self._events[halves.now]
        ready.record(main)
        side.wait_event(ready)
        with side.active():
            collective()
        done.record(side)
        try:
            halves.switch()
        finally:
            main.wait_event(done)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class _Halves(Generic[T]):
    """Two threads of which one runs: the caller's, and one for the second half."""

    def __init__(self, device: Device, second: Callable[[], T]) -> None:
        self._device, self._second = device, second
        self._may_go = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended, self._over = [False, False], threading.Event()
        self._given: list[T] = []
        self._error: BaseException | None = None
        self.now = 0

    def run(self, first: Callable[[], T]) -> tuple[T, T]:
        """Run the first half, and wait for the second."""
        found: list[T] = []
        try:
            found.append(first())
        except BaseException as error:
            self._error = self._error or error
        self._end(0)
        self._over.wait()
        if self._error is not None:
            raise self._error
        return found[0], self._given.pop()

    def switch(self) -> None:
        """The other half goes on, until it gives the turn back."""
        own, other = self.now, 1 - self.now
        if not self._ended[other]:
            self.now = other
            self._may_go[other].release()
            self._may_go[own].acquire()
        if self._error is not None:
            raise DeviceError("the other half of the step failed")

    def follow(self) -> None:
        """Run the second half, whenever it is its turn."""
        self._may_go[1].acquire()
        try:
            if self._error is None:
                with self._device.joined(), torch.inference_mode():
                    self._given.append(self._second())
        except BaseException as error:
            self._error = self._error or error
        del self._second  # its tensors are freed while this thread has the turn, not some time later
        self._end(1)
        self._over.set()

    def _end(self, own: int) -> None:
        self._ended[own], self.now = True, 1 - own
        self._may_go[1 - own].release()
