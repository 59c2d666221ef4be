"""The live probe: torch's warn mode, judged per thread, plus the calls it says nothing of.

Three parts. A torch function mode on each watching thread times the user's calls and inspects copies. A warnings hook
hears of the syncs torch knows and marks the call that is under way on this thread. Wrappers around Event, Stream and
device synchronisation report what torch is silent about. torch's mode is process-wide and stays at "warn": a thread that
watches nothing is never disturbed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import torch
from torch.overrides import TorchFunctionMode

from headway.syncs.calls import CALLS, Call, kind_of, label_of
from headway.syncs.copies import suspicion
from headway.syncs.errors import ProbeError
from headway.syncs.findings import Kind, Wait
from headway.syncs.frames import locate, within
from headway.syncs.kinds import kinds_of
from headway.syncs.places import Site
from headway.syncs.probes import Counted, Probe, Sink
from headway.syncs.regions import judge, wanted
from headway.syncs.runtime import CudaRuntime, EntryPoint, Patches, Runtime
from headway.syncs.trees import Tree, decide, parse

MESSAGE: Final = "called a synchronizing CUDA operation"
ANNOTATION: Final = "headway.syncs "
UNHEARD_FILE: Final = "unheard.json"
Unheard = dict[str, Tree]
SPINS: Final = 8
"""So many queries answered "not yet" in a row, from one line, are a wait."""


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """One that is under way: who waits for it.

    Attributes:
        thread: that called ``backward()``.
        context: its regions.
        sink: where its waits go.
        frame: of the call.
    """

    thread: int
    context: contextvars.Context
    sink: Sink
    frame: FrameType | None


class BackwardPasses:
    """Those under way, on any thread.

    Autograd runs the operations of a device on a thread of its own, which has no regions and no sinks, while the thread that
    called ``backward()`` waits for it. So what is heard there counts for that caller; with several under way, for the newest.
    """

    def __init__(self) -> None:
        self._open: list[BackwardPass] = []

    @contextlib.contextmanager
    def under_way(self, sink: Sink, frame: FrameType | None) -> Iterator[None]:
        """One of this thread's, called in ``frame``, whose waits go to ``sink``."""
        entry = BackwardPass(threading.get_ident(), contextvars.copy_context(), sink, frame)
        self._open.append(entry)
        try:
            yield
        finally:
            self._open.remove(entry)

    def of_this_thread(self) -> BackwardPass | None:
        """The pass that another thread waits for this one to run; None where there is none."""
        passes = list(self._open)
        if not passes or torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - torch.utils.checkpoint asks it, too
            return None
        return None if any(entry.thread == threading.get_ident() for entry in passes) else passes[-1]


class _Thread(threading.local):
    """What the probe knows of one thread."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.modes: list[contextlib.ExitStack] = []
        self.spin: tuple[object, int, int] = (None, 0, 0)


class _Mode(TorchFunctionMode):
    """Sends every torch call of this thread through the probe."""

    def __init__(self, probe: LiveProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self._probe.call(func, args, kwargs or {})


class LiveProbe:
    """See the module. One instance serves all threads; attach() is per thread and nests."""

    name = "torch"
    watches = "torch's sync warnings, copies between host and device, event, stream and device synchronise, query loops"

    def __init__(
        self, runtime: Runtime, annotate: bool = False, light: bool = False, unheard: Unheard | None = None
    ) -> None:
        """A probe.

        Args:
            annotate: write each call's user line into torch.profiler's trace, where the profiler probe reads it.
            light: cost nothing until somebody waits: no function mode, so torch's own syncs have no name and no time,
                and copies and query loops are not looked at.
            unheard: calls that wait without torch's saying so; by default those a card has shown.
        """
        self._runtime = runtime
        self._unheard = unheard_calls() if unheard is None else unheard
        self._annotate = annotate
        self._light = light
        self._thread = _Thread()
        self._shared = Counted(self._arm, self._disarm)
        self._patches = Patches()
        self._backward_passes = BackwardPasses()
        self._heard = 0
        self._proven = False

    def attach(self, sink: Sink) -> None:
        """Watch this thread.

        Raises:
            ProbeError: no device, or torch's warnings do not arrive here.
        """
        self.arm()
        mode = contextlib.ExitStack()
        if not self._light:
            mode.enter_context(_Mode(self))
        self._thread.modes.append(mode)
        self._thread.sinks.append(sink)

    def detach(self) -> None:
        """Undo one attach() of this thread."""
        self._thread.sinks.pop()
        self._thread.modes.pop().close()
        self.disarm()

    def arm(self) -> None:
        """The process-wide part alone: torch warns, waits are wrapped. Counted. For those who open regions without probes.

        Raises:
            ProbeError: no device, or torch's warnings do not arrive here.
        """
        self._runtime.require()
        self._shared.__enter__()
        try:
            self._prove()
        except BaseException:
            self._shared.__exit__()
            raise

    def disarm(self) -> None:
        """Undo one arm()."""
        self._shared.__exit__()

    def rearm(self) -> None:
        """Cheap, from time to time: others may have put their own filters for warnings in front of ours."""
        self._rearm()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call of the user's and report it if it waited."""
        if getattr(function, "__name__", "") == "__get__" or not wanted():
            return function(*args, **kwargs)
        label = label_of(function)
        if label.startswith("ops.profiler."):  # record_function, ours or the user's
            return function(*args, **kwargs)
        CALLS.raise_pending()
        self._rearm()
        self._thread.spin = (None, 0, 0)  # whoever works between two queries does not spin
        return self.observed(label, function, args, kwargs)

    def observed(self, label: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call itself, named, timed and judged."""
        call, begin = self._open(label)
        try:
            with self._annotation(label):
                result = function(*args, **kwargs)
        finally:
            CALLS.open.pop()
        micros = (time.perf_counter_ns() - begin) / 1000
        implied = suspicion(label, args, kwargs, result, self._runtime)
        if implied is None and not call.waited and label in self._unheard:
            call.waited = self._is_unheard(label, args, kwargs)
        if implied is not None or call.waited:
            self._report(implied or kind_of(label, args), label, call, micros, begin)
        for place in (call.inner or {}).items():
            self._report(Kind.OTHER, label, None, None, begin, place)
        return result

    def _is_unheard(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call that torch said nothing of waits all the same, by what a card has shown of such arguments."""
        if not any(
            isinstance(value, torch.Tensor) and self._runtime.on_device(value) for value in (*args, *kwargs.values())
        ):
            return False
        return decide(self._unheard[label], parse(kinds_of(args, kwargs)))

    def _annotation(self, label: str) -> contextlib.AbstractContextManager[object]:
        if not self._annotate:
            return contextlib.nullcontext()
        site, _ = locate()
        text = json.dumps([site.file, site.line, site.function, label])
        return torch.profiler.record_function(ANNOTATION + text)

    def _open(self, label: str) -> tuple[Call, int]:
        call = Call(label)
        CALLS.open.append(call)
        return call, time.perf_counter_ns()

    def _report(
        self,
        kind: Kind,
        label: str,
        call: Call | None,
        micros: float | None,
        begin: int,
        place: tuple[Site, tuple[str, ...]] | None = None,
    ) -> None:
        sink: Sink = self._thread.sinks[-1] if self._thread.sinks else judge  # others' threads: whole-program listeners
        exact = call.driver_micros if call is not None else None
        site, stack = place or locate()
        passed = self._backward_passes.of_this_thread()
        if passed is not None:
            sink = passed.sink
            if not stack:  # no line of the user's runs on autograd's thread: the one that called backward()
                site, stack = locate(passed.frame)
        thread = threading.current_thread().name
        sink(
            Wait(
                site,
                kind,
                label,
                micros if exact is None else exact,
                begin,
                thread,
                self.name,
                None,
                stack,
                within=within(),
            )
        )

    def check(self) -> None:
        """Prove once more, at the end: others may have taken torch's mode away meanwhile. (A trace has a proof of its own.)

        Raises:
            ProbeError: a deliberate sync went unnoticed.
        """
        if not self._annotate:
            self._proven = False
            self._prove()

    # Process-wide parts: set up by the first thread, taken down by the last.

    def _arm(self) -> None:
        self._rearm()
        self._runtime.warn_mode(True)
        try:
            for entry in self._runtime.entry_points():
                if self._light and entry.kind is Kind.QUERY:
                    continue
                self._patches.put(entry, functools.partial(self._wrap, entry))
            for name in ("backward", "grad"):  # Tensor.backward looks torch.autograd.backward up at each call
                self._patches.put(EntryPoint(torch.autograd, name, Kind.OTHER, f"torch.autograd.{name}"), self._follow)
        except ProbeError:
            self._disarm()
            raise

    def _disarm(self) -> None:
        self._patches.remove()
        self._runtime.warn_mode(False)
        hook = warnings.showwarning
        if getattr(hook, "owner", None) is self:
            warnings.showwarning = getattr(hook, "previous")  # noqa: B009 - an attribute of a function, unknown to mypy
        filters = cast("list[Any]", warnings.filters)
        for entry in [entry for entry in filters if _is_ours(entry)]:
            filters.remove(entry)

    def _rearm(self) -> None:
        """Put our filter and hook in front: pytest and catch_warnings take them away without asking."""
        filters = warnings.filters
        if not filters or not _is_ours(filters[0]):
            warnings.filterwarnings("always", message=MESSAGE)
        if getattr(warnings.showwarning, "owner", None) is self:
            return
        previous = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if MESSAGE not in str(message):
                previous(message, category, filename, lineno, file, line)
            else:
                self._hear()

        show.owner = self  # type: ignore[attr-defined]
        show.previous = previous  # type: ignore[attr-defined]
        warnings.showwarning = show

    def _hear(self) -> None:
        """A sync torch knows, on this thread. Inside a call we time it is reported at the end, else now."""
        self._heard += 1
        call, passed = CALLS.outermost, self._backward_passes.of_this_thread()
        if call is not None:
            call.hear()
        elif passed is not None:
            passed.context.copy().run(self._report, Kind.OTHER, "backward", None, None, time.perf_counter_ns())
        elif wanted():
            self._report(Kind.OTHER, "torch", None, None, time.perf_counter_ns())

    def _prove(self) -> None:
        if self._proven or self._runtime.capturing():
            return
        self._rearm()
        before = self._heard
        self._open("proof")
        try:
            self._runtime.prove()
        finally:
            CALLS.open.pop()
        if self._heard == before:
            raise ProbeError(
                "a deliberate sync went unnoticed: torch's sync warnings do not reach warnings.showwarning"
            )
        self._proven = True

    def _wrap(self, entry: EntryPoint, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if CALLS.open or not wanted():
                return original(*args, **kwargs)
            if entry.kind is Kind.QUERY:
                return self._poll(entry, original, args, kwargs)
            call, begin = self._open(entry.label)
            try:
                with self._annotation(entry.label):
                    result = original(*args, **kwargs)
            finally:
                CALLS.open.pop()
            self._report(entry.kind, entry.label, call, (time.perf_counter_ns() - begin) / 1000, begin)
            return result

        return wrapper

    def _follow(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A backward pass: what autograd's thread waits for meanwhile is the caller's."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return original(*args, **kwargs)
            sink: Sink = self._thread.sinks[-1] if self._thread.sinks else judge
            with self._backward_passes.under_way(sink, inspect.currentframe()):
                return original(*args, **kwargs)

        return wrapper

    def _poll(self, entry: EntryPoint, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One query; SPINS of them in a row from one line that find work unfinished are a wait."""
        done = original(*args, **kwargs)
        site, _ = locate()
        key, count, began = self._thread.spin
        if done or key != site:
            self._thread.spin = (None if done else site, 0 if done else 1, time.perf_counter_ns())
            return done
        self._thread.spin = (key, count + 1, began)
        if count + 1 == SPINS:
            micros = (time.perf_counter_ns() - began) / 1000
            self._report(entry.kind, entry.label, None, micros, began)
        return done


def _is_ours(entry: Any) -> bool:
    pattern = entry[1]
    return entry[0] == "always" and getattr(pattern, "pattern", pattern) == MESSAGE


@functools.cache
def unheard_calls() -> Unheard:
    """Calls whose waits torch's mode does not know, by name, and of which arguments. Made by ``bench/syncs_unheard.py``."""
    found: Unheard = json.loads(Path(__file__).with_name(UNHEARD_FILE).read_text(encoding="utf-8"))["calls"]
    return found


@functools.cache
def default_probes() -> tuple[Probe, ...]:
    """What record() and forbid() attach unless told otherwise."""
    return (LiveProbe(CudaRuntime()),)
