"""Compiles grammars in processes that can be killed, and remembers what it compiled."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict

import msgspec

from headway.api.structured.compile import Outcome, Task
from headway.api.structured.worker import HEADER
from headway.core.errors import EngineDeadError, InvalidRequestError
from headway.core.params import StructuredOutputsParams

MAX_SPEC_BYTES = 64 * 1024
MAX_SECONDS = 10.0
MAX_WORKERS = 4
MAX_CACHED, MAX_CACHED_BYTES = 512, 64 * 1024 * 1024
WHERE = "structured_outputs"


class _Worker:
    """One compiling process; it does one task at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headway.api.structured.worker"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, task: Task, seconds: float) -> Outcome | None:
        """The outcome; None when it did not come in time or the process died: it is of no use any more."""
        data = msgspec.msgpack.encode(task)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(HEADER.pack(len(data)) + data)
            deadline = time.monotonic() + seconds
            header = self._read(HEADER.size, deadline)
            answer = None if header is None else self._read(HEADER.unpack(header)[0], deadline)
            return None if answer is None else msgspec.msgpack.decode(answer, type=Outcome)
        except (OSError, msgspec.DecodeError):
            return None

    def _read(self, size: int, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        parts = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(parts) < size:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(self._process.stdout.fileno(), size - len(parts))
                if not part:
                    return None
                parts += part
        return parts

    def stop(self) -> None:
        """End its task from another thread: whoever waits for it gets None, and kills it."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Pool:
    """Idle workers. Separate from the compiler, so that its end can be arranged without keeping that alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._room = threading.BoundedSemaphore(MAX_WORKERS)
        self._closed = False

    def run(self, task: Task, seconds: float) -> Outcome | None:
        """Run the task on an idle or new worker; waits while all are busy. None: it took too much time or memory."""
        with self._room:
            with self._lock:
                if self._closed:
                    raise EngineDeadError("the engine is shut down")
                worker = self._idle.pop() if self._idle else _Worker()
                self._busy.add(worker)
            outcome = None
            try:
                outcome = worker.run(task, seconds)
            finally:
                with self._lock:
                    self._busy.discard(worker)
                    keep = outcome is not None and not self._closed
                    if keep:
                        self._idle.append(worker)
                if not keep:
                    worker.kill()
        if outcome is None and self._closed:
            raise EngineDeadError("the engine is shut down")
        return outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.stop()
        for worker in idle:
            worker.kill()


class GrammarCompiler:
    """Turns what requests ask for into automata. Safe to share between threads; processes start with the first grammar.

    Args:
        usable: bytes that the vocabulary can spell.
        seconds: how long one grammar may take.
    """

    def __init__(self, usable: frozenset[int], seconds: float = MAX_SECONDS) -> None:
        self._usable = bytes(sorted(usable))
        self._seconds = seconds
        self._pool = _Pool()
        self._finalizer = weakref.finalize(self, self._pool.close)
        self._lock = threading.Lock()
        self._known: OrderedDict[Task, Outcome] = OrderedDict()
        self._known_bytes = 0

    def compile(self, wanted: StructuredOutputsParams) -> Outcome:
        """``wanted`` as an automaton or as a grammar for the host's matcher; never a refusal.

        Raises:
            InvalidRequestError: it is wrong, not supported, or takes too much to compile.
            EngineDeadError: the compiler was closed.
        """
        task = make_task(wanted, self._usable)
        outcome = self._recall(task)
        if outcome is None:
            outcome = self._pool.run(task, self._seconds)
            if outcome is None:
                outcome = Outcome(
                    refusal=f"it takes over {self._seconds:g} s or too much memory to compile; simplify it"
                )
            self._remember(task, outcome)
        return _served(task, outcome)

    def known(self, wanted: StructuredOutputsParams) -> Outcome | None:
        """As ``compile`` where that would take microseconds; None where it would take longer."""
        task = make_task(wanted, self._usable)
        outcome = self._recall(task)
        return None if outcome is None else _served(task, outcome)

    def _recall(self, task: Task) -> Outcome | None:
        with self._lock:
            outcome = self._known.get(task)
            if outcome is not None:
                self._known.move_to_end(task)
            return outcome

    def _remember(self, task: Task, outcome: Outcome) -> None:
        with self._lock:
            if task not in self._known:
                self._known[task] = outcome
                self._known_bytes += _size(task, outcome)
            while len(self._known) > MAX_CACHED or self._known_bytes > MAX_CACHED_BYTES:
                self._known_bytes -= _size(*self._known.popitem(last=False))

    def close(self) -> None:
        """End the processes; whoever waits for one gets EngineDeadError. Safe to call twice."""
        self._finalizer()


def _served(task: Task, outcome: Outcome) -> Outcome:
    """Raises InvalidRequestError for a refusal."""
    if outcome.refusal is not None:
        raise InvalidRequestError(f"{WHERE}: {task.kind}: {outcome.refusal}", WHERE)
    return outcome


def _size(task: Task, outcome: Outcome) -> int:
    return len(task.text) + (0 if outcome.automaton is None else len(outcome.automaton.transitions))


def make_task(wanted: StructuredOutputsParams, usable: bytes) -> Task:
    """What the worker needs to know.

    Raises:
        InvalidRequestError: it is too large, or cannot be written as JSON.
    """
    if wanted.json_object:
        return Task("json_object", "", usable)
    if wanted.regex is not None or wanted.grammar is not None:
        task = Task("grammar" if wanted.regex is None else "regex", wanted.regex or wanted.grammar or "", usable)
    else:
        try:
            given = wanted.json if wanted.choice is None else wanted.choice
            text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{WHERE}: json cannot be written as JSON: {error}", WHERE) from None
        task = Task("json" if wanted.choice is None else "choice", text, usable)
    try:
        size = len(task.text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{WHERE}: {task.kind} is not valid Unicode (lone surrogates)", WHERE) from None
    if size > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"{WHERE}: {task.kind} is {size} bytes long; at most {MAX_SPEC_BYTES} are allowed", WHERE
        )
    return task
