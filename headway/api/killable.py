"""Work that clients choose, in processes that can be killed: grammars, chat templates, very long texts.

A process serves one job at a time over an inherited socket pair; frames are a four-byte length and bytes. It limits itself: a
timer of *processor* time ends it (SIGPROF), a limit on its address space makes allocations fail. So its end tells whose fault
it was. The timer, and a crash that happens again in a fresh process, are the job's own. The rest is not its fault: a kill
from outside, a process that was stopped, a machine too busy to run it. Such a job is tried once more, and then the
caller is told to come back later (``BusyError``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from headway.core.errors import BusyError, EngineDeadError
from headway.core.log import logger
from headway.core.processes import processor_seconds

LENGTH: Final = struct.Struct("<I")
TICK_SECONDS: Final = 0.5
STUCK_SECONDS: Final = 5.0
"""A process with a job that has used no processor time for so long is stopped, or waits for something that will not come."""
BOOT_SECONDS: Final = 30.0
"""Added to a job's wall time: its process may have to start first."""
STARVED: Final = 6.0
"""How many times the processor time it may use a job may take by the clock, on a busy machine."""
EXIT_SECONDS: Final = 2.0
"""How long a process that has closed its socket may take to end."""
CRASHES: Final = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
"""How native code ends when memory or the stack runs out."""
KEPT_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Keys and tokens in the environment are none of a client's business."""


class TooMuchError(Exception):
    """The job itself went over a limit.

    Attributes:
        time: of processor time; otherwise of memory, or of the stack.
    """

    def __init__(self, time: bool) -> None:
        super().__init__("processor time" if time else "memory")
        self.time = time


class _LostError(Exception):
    """The process is gone or makes no progress, and that says nothing about its job."""


class _CrashError(Exception):
    """The process crashed: the job's fault if it happens again."""


class _StarvedError(Exception):
    """The machine gives the process too little time: trying again would not help."""


class Job:
    """One job, so that another thread can give it up: its process is killed, or it never gets one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.given_up = False

    def give_up(self) -> None:
        """Nobody wants the answer any more."""
        with self._lock:
            self.given_up = True
            if self._child is not None:
                self._child.kill()

    def hold(self, child: _Child | None) -> None:
        """The process that does it now; None: it is done."""
        with self._lock:
            self._child = child
            if child is not None and self.given_up:
                child.kill()


class _Child:
    """One process and the socket to it."""

    def __init__(self, module: str, boot: bytes, seconds: float, memory: int) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), repr(seconds), str(memory)],
                    env={**environment, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._socket = ours
        self._boot: bytes | None = boot
        self._seconds = seconds

    def ask(self, data: bytes) -> bytes:
        """The answer to one job."""
        sending = memoryview(_frame(data) if self._boot is None else _frame(self._boot) + _frame(data))
        self._boot = None
        received = bytearray()
        progress = _Progress(self.process.pid, self._seconds * STARVED + BOOT_SECONDS)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                ready = selector.select(TICK_SECONDS)
                if not ready:
                    progress.check()
                try:
                    for _, events in ready:
                        if events & selectors.EVENT_WRITE:
                            sending = sending[self._socket.send(sending[: 2**20]) :]
                            if not sending:
                                selector.modify(self._socket, selectors.EVENT_READ)
                        if events & selectors.EVENT_READ:
                            piece = self._socket.recv(2**20)
                            if not piece:
                                raise self._ended()
                            received += piece
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError:
                    raise self._ended() from None
                if len(received) >= LENGTH.size and len(received) >= LENGTH.size + LENGTH.unpack_from(received)[0]:
                    return bytes(received[LENGTH.size :])

    def _ended(self) -> Exception:
        """Why the process has closed its socket."""
        try:
            status = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return _LostError("closed its connection")
        if status == -signal.SIGPROF:
            return TooMuchError(time=True)
        if status > 0 or -status in CRASHES:
            return _CrashError(f"ended with {status}")
        return _LostError(f"ended with {status}")

    def kill(self) -> None:
        """From any thread; whoever waits for its answer is told that it is lost."""
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self._socket.close()


class _Progress:
    """Whether a process that has a job gets anywhere."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._used = -1.0
        self._since = time.monotonic()
        self._end = self._since + seconds

    def check(self) -> None:
        """Raises _LostError when it is stuck, _StarvedError when its time by the clock is over."""
        now = time.monotonic()
        used = processor_seconds(self._pid)
        if used is not None and used != self._used:
            self._used, self._since = used, now
        elif used is not None and now - self._since > STUCK_SECONDS:
            raise _LostError("stopped or stuck")
        if now > self._end:
            raise _StarvedError


class Pool:
    """Processes for one kind of job. Safe to share between threads; processes start when they are needed.

    Args:
        module: run as ``python -m module``; it calls ``serve``.
        boot: first frame of each process, before any job.
        workers: jobs at once; others wait.
        seconds: processor time for one job.
        memory: bytes of address space of each process.
        what: the work, for messages: "compiling a grammar".
    """

    def __init__(self, module: str, boot: bytes, workers: int, seconds: float, memory: int, what: str) -> None:
        self._module, self._boot, self._memory, self._what = module, boot, memory, what
        self.seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._room = threading.BoundedSemaphore(workers)
        self._closed = False
        self._finalizer = weakref.finalize(self, _end, self._lock, self._idle, self._busy)

    def run(self, data: bytes, job: Job | None = None, keep: bool = True) -> bytes:
        """The answer to ``data``; waits while all processes are busy.

        Args:
            keep: False: the process is not used again, so its memory returns to the system.

        Raises:
            TooMuchError: the job goes over its processor time or memory.
            BusyError: two processes in a row were lost, or the machine is too busy.
            EngineDeadError: the pool was closed.
        """
        job = job or Job()
        with self._room:
            for last in (False, True):
                try:
                    return self._once(data, job, keep)
                except (_CrashError, _LostError, OSError) as error:
                    if self._closed:
                        raise EngineDeadError("the engine is shut down") from None
                    if job.given_up:
                        break
                    logger.warning("a process for %s was lost (%s)%s", self._what, error, "" if last else "; once more")
                    if last and isinstance(error, _CrashError):
                        raise TooMuchError(time=False) from None
                except _StarvedError:
                    break
        raise BusyError(f"{self._what} was not finished: the machine is too busy, or its process was killed; try again")

    def _once(self, data: bytes, job: Job, keep: bool) -> bytes:
        child = self._take()
        answer = None
        try:
            job.hold(child)
            answer = child.ask(data)
            return answer
        finally:
            job.hold(None)
            with self._lock:
                self._busy.discard(child)
                keep = keep and answer is not None and not self._closed and not job.given_up
                if keep:
                    self._idle.append(child)
            if not keep:
                child.close()

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is shut down")
            while self._idle:
                child = self._idle.pop()
                if child.process.poll() is None:
                    self._busy.add(child)
                    return child
                child.close()
        child = _Child(self._module, self._boot, self.seconds, self._memory)
        with self._lock:
            self._busy.add(child)
            if self._closed:
                child.kill()
        return child

    def close(self) -> None:
        """End the processes; whoever waits for one gets EngineDeadError. Safe to call twice."""
        self._closed = True
        _end(self._lock, self._idle, self._busy)


def _end(lock: threading.Lock, idle: list[_Child], busy: set[_Child]) -> None:
    with lock:
        ended = list(idle)
        idle.clear()
        for child in busy:
            child.kill()
    for child in ended:
        child.close()


# -- inside the process ------------------------------------------------------------------------------------------------


def serve(arguments: list[str], start: Callable[[bytes], Callable[[bytes], bytes]]) -> int:
    """Be the process: limit it, build the worker from the first frame, do jobs until the other end closes.

    Args:
        arguments: of the command line: file descriptor, seconds, bytes.
        start: the boot frame -> what turns a job into its answer.
    """
    fd, seconds, memory = int(arguments[0]), float(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # an administrator may have set lower limits
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=fd) as connection:
        boot = _receive(connection)
        if boot is None:
            return 0
        work = start(boot)
        while (data := _receive(connection)) is not None:
            signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))  # its signal's default action ends the process
            answer = work(data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(_frame(answer))
    return 0


def _frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket) -> bytes | None:
    """Next frame; None at the end."""
    head = _exactly(connection, LENGTH.size)
    return None if head is None else _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)
