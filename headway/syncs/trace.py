"""torch.profiler's records read after the fact: blocking CUDA calls with their lines, and what the streams did when."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from headway.syncs.driver import ASYNC_COPIES, blocking, plain
from headway.syncs.findings import Kind, Wait
from headway.syncs.live import ANNOTATION
from headway.syncs.places import Site
from headway.syncs.recording import Event, Recording

PROOF: Final = ANNOTATION + "proof"
END: Final = ANNOTATION + "end"


@dataclasses.dataclass
class Trace:
    """What a recording says.

    Attributes:
        waits: blocking calls inside torch calls of the program, each with its line; times in the recording's clock.
        outside: those outside, in extensions for example: what is known is the line of the torch call before them.
        streams: stream name -> (start, duration, name) in microseconds, in order.
        begin: the end of the last deliberate wait, which is the program's start, in the recording's clock.
        proven: whether the deliberate wait at the start was recorded, so that an empty list means none.
        unread: pieces of device work that ``streams`` lacks, the last ones.
    """

    waits: list[Wait]
    streams: dict[str, list[tuple[float, float, str]]]
    proven: bool
    begin: float = 0.0
    unread: int = 0
    outside: list[Wait] = dataclasses.field(default_factory=list)

    @staticmethod
    def shifted(wait: Wait, micros: float) -> Wait:
        """``wait`` on another clock."""
        return dataclasses.replace(wait, start_ns=int(wait.start_ns + micros * 1000))


class _Intervals:
    """Nested intervals of one thread, given in order; finds those around a moment, or before it."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._starts = [event.start for event in events]
        self._parents: list[int] = []
        open_: list[int] = []
        for index, event in enumerate(events):
            while open_ and events[open_[-1]].end < event.start:
                open_.pop()
            self._parents.append(open_[-1] if open_ else -1)
            open_.append(index)

    def around(self, moment: float) -> Iterable[Event]:
        """Events that contain ``moment``, innermost first."""
        index = bisect.bisect_right(self._starts, moment) - 1
        while index >= 0:
            if self._events[index].end >= moment:
                yield self._events[index]
            index = self._parents[index]

    def before(self, moment: float) -> Event | None:
        """The last event that began before ``moment``."""
        index = bisect.bisect_right(self._starts, moment) - 1
        return self._events[index] if index >= 0 else None


def may_wait(name: str) -> bool:
    """Whether a CUDA call of this name is a wait, always or with pageable memory."""
    return blocking(name) is not None or plain(name) in ASYNC_COPIES


def read(recording: Recording, threads: Mapping[int, str] | None = None) -> Trace:
    """The waits and the streams of a recording.

    Args:
        threads: names of host threads, as far as known.
    """
    lines: dict[int, list[Event]] = defaultdict(list)
    marks: dict[int, list[Event]] = defaultdict(list)
    for event in recording.annotations:
        (marks if event.name in (PROOF, END) else lines)[event.lane].append(event)
    streams: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    every_mark = [event for found in marks.values() for event in found]
    begin = max((event.end for event in every_mark if event.name == PROOF), default=0.0)
    for event in recording.work:
        if event.start >= begin:
            streams[f"GPU {event.device}, stream {event.lane}"].append((event.start, event.micros, event.name))
    end = min((event.start for event in every_mark if event.name == END), default=float("inf"))
    by_line = {lane: _Intervals(found) for lane, found in lines.items()}
    by_mark = {lane: _Intervals(found) for lane, found in marks.items()}
    nowhere = _Intervals([])
    trace = Trace([], dict(sorted(streams.items())), False, begin, recording.unread)
    for call in recording.calls:
        kind = _kind(call, recording.pageable)
        if kind is None or call.start >= end:
            continue
        if any(mark.name == PROOF for mark in by_mark.get(call.lane, nowhere).around(call.start)):
            trace.proven = True
        elif call.start >= begin:
            thread = (threads or {}).get(call.lane, f"thread {call.lane}")
            _attribute(trace, call, kind, by_line.get(call.lane, nowhere), thread)
    return trace


def _kind(call: Event, pageable: set[int]) -> Kind | None:
    if plain(call.name) in ASYNC_COPIES:
        return Kind.PAGEABLE if call.correlation in pageable else None
    return blocking(call.name)


def _attribute(trace: Trace, call: Event, kind: Kind, lines: _Intervals, thread: str) -> None:
    inside = next(iter(lines.around(call.start)), None)
    near = inside or lines.before(call.start)
    site, label = Site("<native thread>", 0, ""), plain(call.name)
    if near is not None:
        file, line, function, torch_call = json.loads(near.name.removeprefix(ANNOTATION))
        site = Site(str(file), int(line), str(function))
        label = label if inside else f"{label} after {torch_call}"
    wait = Wait(site, kind, label, call.micros, int(call.start * 1000), thread, "profiler")
    (trace.waits if inside else trace.outside).append(wait)
