"""Waits of the pretended device: each is told once, on the line of the program that it belongs to."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from headway.syncs.calls import CALLS, Call
from headway.syncs.findings import Kind, Wait
from headway.syncs.frames import is_installed, is_users, locate, within
from headway.syncs.regions import judge, wanted


class SimCall(Call):
    """One call of the user's into torch, the frame that it is made in, and the first wait seen inside it."""

    __slots__ = ("frame", "kind")

    def __init__(self, label: str, frame: FrameType | None) -> None:
        super().__init__(label)
        self.frame = frame
        self.kind: Kind | None = None


def flag(kind: Kind, label: str) -> None:
    """A wait: on the user's call under way on this thread, or by itself, on the line of a hook that the call came to."""
    for call in CALLS.open:
        if isinstance(call, SimCall) and not _in_a_hook(call):
            call.kind = call.kind or kind
            return
    report(kind, label)


def _in_a_hook(call: SimCall) -> bool:
    """Whether torch has called the program back: lines of its own stand between the call and this frame."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame is not call.frame:
        file = frame.f_code.co_filename
        if is_users(file) and not is_installed(file):
            return True
        frame = frame.f_back
    return False


def report(kind: Kind, label: str) -> None:
    """Send a wait to whoever watches this thread."""
    if wanted():
        site, stack = locate()
        name = threading.current_thread().name
        now = time.perf_counter_ns()
        judge(Wait(site, kind, label, None, now, name, "simulation", None, stack, within=within()))
