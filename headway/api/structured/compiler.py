"""Compiles grammars in processes that can be killed, and remembers what it compiled."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

import msgspec

from headway.api.killable import Job, Pool, TooMuchError
from headway.api.structured.compile import Outcome, Task
from headway.core.errors import InvalidRequestError
from headway.core.params import StructuredOutputsParams

MAX_SPEC_BYTES = 64 * 1024
MAX_SECONDS = 10.0
MAX_MEMORY_BYTES = 1024 * 1024 * 1024
MAX_WORKERS = 4
LIMIT_SECONDS = 60.0
"""How long it is remembered that a grammar went over a limit: a busy machine's verdict must not hold for good."""
MAX_CACHED, MAX_CACHED_BYTES = 512, 64 * 1024 * 1024
WHERE = "structured_outputs"


class GrammarCompiler:
    """Turns what requests ask for into automata. Safe to share between threads; processes start with the first grammar.

    Args:
        usable: bytes that the vocabulary can spell.
        seconds: processor time that one grammar may take.
        clock: seconds, for how long verdicts are remembered.
    """

    def __init__(
        self, usable: frozenset[int], seconds: float = MAX_SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._usable = bytes(sorted(usable))
        self._clock = clock
        self._pool = Pool(
            "headway.api.structured.worker", b"", MAX_WORKERS, seconds, MAX_MEMORY_BYTES, "compiling a grammar"
        )
        self._lock = threading.Lock()
        self._known: OrderedDict[Task, Outcome] = OrderedDict()
        self._known_bytes = 0
        self._until: dict[Task, float] = {}
        """When a verdict about a limit is forgotten."""

    def compile(self, wanted: StructuredOutputsParams, job: Job | None = None) -> Outcome:
        """``wanted`` as an automaton or as a grammar for the host's matcher; never a refusal.

        Args:
            job: by which another thread can give the work up.

        Raises:
            InvalidRequestError: it is wrong, not supported, or takes too much to compile.
            BusyError: that could not be found out now.
            EngineDeadError: the compiler was closed.
        """
        task = make_task(wanted, self._usable)
        outcome = self._recall(task)
        if outcome is None:
            until = None
            try:
                outcome = msgspec.msgpack.decode(self._pool.run(msgspec.msgpack.encode(task), job), type=Outcome)
            except TooMuchError as error:
                limit = f"over {self._pool.seconds:g} s of processor time" if error.time else "too much memory"
                outcome = Outcome(refusal=f"it takes {limit} to compile; simplify it")
                until = self._clock() + LIMIT_SECONDS
            self._remember(task, outcome, until)
        return _served(task, outcome)

    def known(self, wanted: StructuredOutputsParams) -> Outcome | None:
        """As ``compile`` where that would take microseconds; None where it would take longer."""
        task = make_task(wanted, self._usable)
        outcome = self._recall(task)
        return None if outcome is None else _served(task, outcome)

    def _recall(self, task: Task) -> Outcome | None:
        with self._lock:
            outcome = self._known.get(task)
            if outcome is not None and self._clock() >= self._until.get(task, float("inf")):
                self._forget(task)
                return None
            if outcome is not None:
                self._known.move_to_end(task)
            return outcome

    def _remember(self, task: Task, outcome: Outcome, until: float | None) -> None:
        with self._lock:
            if task not in self._known:
                self._known[task] = outcome
                self._known_bytes += _size(task, outcome)
                if until is not None:
                    self._until[task] = until
            while len(self._known) > MAX_CACHED or self._known_bytes > MAX_CACHED_BYTES:
                self._forget(next(iter(self._known)))

    def _forget(self, task: Task) -> None:
        self._known_bytes -= _size(task, self._known.pop(task))
        self._until.pop(task, None)

    def close(self) -> None:
        """End the processes; whoever waits for one gets EngineDeadError. Safe to call twice."""
        self._pool.close()


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
