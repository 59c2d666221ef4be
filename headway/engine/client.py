"""How the API floor reaches an engine: one protocol, and the two clients that live in this process.

==============  =====================  ===============================================
client          engine runs in         used by
==============  =====================  ===============================================
InprocClient    the caller's thread    LLM (default)
ThreadClient    a thread of its own    AsyncLLM(multiprocess=False)
ProcessClient   a process of its own   AsyncLLM (default), LLM(multiprocess=True)
==============  =====================  ===============================================
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, process_time
from types import FrameType
from typing import Protocol, cast

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError, HeadwayError
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, StepUpdates, Update
from headway.core.seat import Seat

DEFAULT_FACTORY = "headway.engine.early:build_engine"

LOOK_SECONDS = 0.005
"""How long an idle engine of several ranks sleeps before it looks for them, in a thread."""
ThreadCommand = Vocabulary | list[AddRequest] | list[str]
"""What a ThreadClient's thread is told: to learn, to add, or to abort."""


class Core(Protocol):
    """What a client needs of the engine; ``headway.engine.core.EngineCore`` is the real one."""

    info: ModelInfo

    def learn(self, vocabulary: Vocabulary) -> None: ...
    def add(self, request: AddRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> StepUpdates: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self) -> None: ...


class EngineClient(Protocol):
    """One engine. Every method raises EngineDeadError once the engine has stopped or the client is closed.

    ``learn``, ``add`` and ``abort`` never block. One thread at a time may ``poll``; except on InprocClient, other
    threads may call the other methods meanwhile.
    """

    @property
    def info(self) -> ModelInfo: ...

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tell the engine the bytes of the model's tokens, before the first request with a grammar."""

    def add(self, requests: list[AddRequest]) -> None:
        """Start requests. A request the engine refuses comes back as an update with finish_reason "error"."""

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests; unknown ids are ignored. Updates already on their way may still arrive."""

    def poll(self, timeout: float | None = None) -> list[Update]:
        """Next updates. Waits (asleep, not spinning) until there are some or ``timeout`` seconds have passed.

        InprocClient, which has no thread of its own, takes one turn whatever the ``timeout``, and returns [] at once
        when it has no work.
        """

    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...

    def processor_seconds(self) -> float | None:
        """Processor time of the engine's process so far: whether a silent engine works. None where that is not known."""

    def close(self) -> None:
        """Stop the engine and free everything; a poll blocked in another thread raises. Safe to call twice."""


def load_core(factory: str, args: EngineArgs, seat: Seat | None = None) -> Core:
    """Import ``module:function`` and build an engine with it (slow: imports torch, reads weights).

    Args:
        seat: see ``boot.build_engine``.
    """
    module, _, name = factory.partition(":")
    build = cast(Callable[..., Core], getattr(importlib.import_module(module), name))
    return build(args) if seat is None else build(args, seat)


def add_all(core: Core, requests: list[AddRequest]) -> list[RequestUpdate]:
    """Add requests; one that the engine refuses fails alone and is returned as an error update."""
    refused = []
    for request in requests:
        try:
            core.add(request)
        except HeadwayError as error:
            refused.append(
                RequestUpdate(request_id=request.request_id, new_token_ids=[], finish_reason="error", error=str(error))
            )
    return refused


@contextlib.contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends, so that it cannot tear the engine's state in the middle of a step.

    Only where Python's own handler is in place and only for the block; a second Ctrl-C interrupts at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    seen = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            raise KeyboardInterrupt


class InprocClient:
    """The engine in the caller's thread: each ``poll`` runs the host loop until something comes out."""

    def __init__(self, args: EngineArgs, factory: str = DEFAULT_FACTORY) -> None:
        self._core: Core | None = load_core(factory, args)
        self.info = self._core.info
        self._refused: list[RequestUpdate] = []
        self._reason = "the engine is shut down"

    def _alive(self) -> Core:
        if self._core is None:
            raise EngineDeadError(self._reason)
        return self._core

    def learn(self, vocabulary: Vocabulary) -> None:
        self._alive().learn(vocabulary)

    def add(self, requests: list[AddRequest]) -> None:
        self._refused += add_all(self._alive(), requests)

    def abort(self, request_ids: list[str]) -> None:
        core = self._alive()
        for request_id in request_ids:
            core.abort(request_id)

    def poll(self, timeout: float | None = None) -> list[Update]:
        core = self._alive()
        updates: list[Update] = [*self._refused]
        self._refused = []
        deadline = None if timeout is None else monotonic() + timeout
        in_time = True
        with interrupt_held_back():
            while not updates and core.has_work() and in_time:
                try:
                    updates = core.step().parts()
                    in_time = deadline is None or monotonic() < deadline
                except Exception as error:
                    self._core, self._reason = None, f"the engine failed: {type(error).__name__}: {error}"
                    with contextlib.suppress(Exception):
                        core.shutdown()
                    raise EngineDeadError(self._reason) from error
        return updates

    def has_work(self) -> bool:
        return self._core is not None and (bool(self._refused) or self._core.has_work())

    def stats(self) -> EngineStats:
        return self._alive().stats()

    def processor_seconds(self) -> float | None:
        return process_time()

    def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()


class _Shared:
    """State of a ThreadClient. Separate, so that the thread does not keep the client itself alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.commands: deque[ThreadCommand] = deque()
        self.updates: list[Update] = []
        self.core: Core | None = None
        self.boot_error: BaseException | None = None
        self.dead: str | None = None
        self.closing = False
        self.busy = False
        """The thread is in ``step`` or holds commands it has not handed to the core yet."""

    def run(self, factory: str, args: EngineArgs, seat: Seat | None) -> None:
        """Body of the engine thread."""
        try:
            core = load_core(factory, args, seat)
        except BaseException as error:
            with self.changed:
                self.boot_error, self.dead = error, "the engine did not start"
                self.changed.notify_all()
            return
        with self.changed:
            self.core = core
            self.changed.notify_all()
        try:
            while self._turn(core):
                pass
            core.shutdown()
        except BaseException as error:
            self._end(f"the engine failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):
                core.shutdown()
        else:
            self._end("the engine is shut down")

    def _end(self, reason: str) -> None:
        """Nobody needs to wait for it any more."""
        with self.changed:
            self.dead, self.busy = reason, False
            self.changed.notify_all()

    def _turn(self, core: Core) -> bool:
        """One turn of the loop: sleep while idle, hand over commands, one step. False when it is time to leave."""
        # Another rank may have gone, or begun a step that needs this one.
        look = LOOK_SECONDS if getattr(core, "watches", False) else None
        with self.changed:
            self.busy = core.has_work()
            while not (self.closing or self.busy or self.commands):
                self.changed.notify_all()
                self.changed.wait(look)
                self.busy = look is not None and core.has_work()
            if self.closing:
                return False
            self.busy = True
            commands, self.commands = self.commands, deque()
        updates: list[Update] = []
        for command in commands:
            if isinstance(command, Vocabulary):
                core.learn(command)
                continue
            for item in command:
                if isinstance(item, str):
                    core.abort(item)
                else:
                    updates += add_all(core, [item])
        updates += core.step().parts()
        if updates:
            with self.changed:
                self.updates += updates
                self.changed.notify_all()
        return True

    def close(self, thread: threading.Thread) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if thread is not threading.current_thread():
            thread.join()


class ThreadClient:
    """The engine in a thread of its own, which sleeps on a condition while there is no work."""

    def __init__(self, args: EngineArgs, factory: str = DEFAULT_FACTORY, seat: Seat | None = None) -> None:
        self._shared = shared = _Shared()
        thread = threading.Thread(target=shared.run, args=(factory, args, seat), name="headway-engine", daemon=True)
        self._finalizer = weakref.finalize(self, shared.close, thread)
        thread.start()
        with shared.changed:
            shared.changed.wait_for(lambda: shared.core is not None or shared.dead is not None)
        if shared.core is None:
            self._finalizer()
            assert shared.boot_error is not None
            raise shared.boot_error
        self.info = shared.core.info

    def _post(self, command: ThreadCommand) -> None:
        with self._shared.changed:
            self._check()
            self._shared.commands.append(command)
            self._shared.changed.notify_all()

    def _check(self) -> None:
        if self._shared.dead is not None or self._shared.closing:
            raise EngineDeadError(self._shared.dead or "the engine is shut down")

    def learn(self, vocabulary: Vocabulary) -> None:
        self._post(vocabulary)

    def add(self, requests: list[AddRequest]) -> None:
        self._post(requests)

    def abort(self, request_ids: list[str]) -> None:
        self._post(request_ids)

    def poll(self, timeout: float | None = None) -> list[Update]:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.updates or shared.dead is not None or shared.closing, timeout)
            if not shared.updates:
                self._check()
            updates, shared.updates = shared.updates, []
        return updates

    def has_work(self) -> bool:
        shared = self._shared
        with shared.changed:
            return shared.dead is None and bool(shared.busy or shared.commands or shared.updates)

    def stats(self) -> EngineStats:
        self._check()
        assert self._shared.core is not None
        return self._shared.core.stats()

    def processor_seconds(self) -> float | None:
        return process_time()

    def close(self) -> None:
        self._finalizer()
