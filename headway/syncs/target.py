"""Running somebody's program inside this process: its argv, its threads, its children, its exit status."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from headway.syncs.errors import ProbeError

_STARTS: Final = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.spawn", "os.exec"}
)


class UsageError(ValueError):
    """The target cannot be run; the message says why."""


def parse(words: list[str]) -> tuple[str, list[str], bool]:
    """(script or module, its arguments, whether it is a module) of ``python script.py x``, ``script.py x``, ``-m module x``.

    Raises:
        UsageError: nothing to run, or interpreter options, which cannot take effect in a running interpreter.
    """
    rest = list(words)
    if rest and Path(rest[0]).name.startswith(("python", "pypy")) and not rest[0].endswith(".py"):
        rest = rest[1:]
    if not rest:
        raise UsageError("nothing to run: headway syncs -- python script.py [arguments]")
    if rest[0] == "-m":
        if len(rest) < 2:
            raise UsageError("-m wants a module")
        return rest[1], rest[2:], True
    if rest[0].startswith("-"):
        raise UsageError(f"{rest[0]}: interpreter options do not take effect here; the target runs in this process")
    if not Path(rest[0]).exists():
        raise UsageError(f"{rest[0]}: no such file")
    return rest[0], rest[1:], False


def run(words: list[str]) -> int:
    """Run the target as ``__main__`` and give its exit status. Its exceptions pass through."""
    name, arguments, is_module = parse(words)
    before, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    sys.path[0:1] = [os.getcwd() if is_module else str(Path(name).resolve().parent)]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    finally:
        sys.argv, sys.path[:] = before, path
    return 0


@contextlib.contextmanager
def on_every_thread(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around the work of each threading.Thread started inside, on that thread, and here."""
    thread_class: Any = threading.Thread
    original = thread_class.start

    def start(thread: threading.Thread) -> None:
        work = thread.run

        def run_watched() -> None:
            enter()
            try:
                work()
            finally:
                leave()

        thread.run = run_watched  # type: ignore[method-assign]
        original(thread)

    thread_class.start = start
    enter()
    try:
        yield
    finally:
        leave()
        thread_class.start = original


class _Leaving(BaseException):
    """os._exit, which would end the process before there is a report."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@contextlib.contextmanager
def last_words(notes: list[str]) -> Iterator[None]:
    """Keep the program from ending this process unheard: os._exit unwinds, and the reason goes to ``notes``."""
    original, process = os._exit, os.getpid()

    def leave(status: int) -> None:
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            original(status)
        raise _Leaving(status)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    except _Leaving as leaving:
        notes.append(f"the program ended itself by os._exit({leaving.status}) before its end")
    finally:
        os._exit = original


@contextlib.contextmanager
def children() -> Iterator[list[str]]:
    """Collect what child processes are started inside, as text. Audit hooks stay for good, so this one falls silent."""
    found: list[str] = []
    listening = True

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "os.exec":
            raise ProbeError("the program replaces itself by another (os.exec), which would not be watched")
        if listening and event in _STARTS:
            what = str(arguments[1]) if event == "subprocess.Popen" and len(arguments) > 1 else ""
            found.append(f"{event} {what}".strip()[:200])

    sys.addaudithook(hear)
    try:
        yield found
    finally:
        listening = False
