"""A torch.profiler trace read after the fact: blocking CUDA calls with their lines, and what the streams did when."""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from headway.syncs.driver import ASYNC_COPIES, blocking, plain
from headway.syncs.findings import Kind, Site, Wait
from headway.syncs.frames import is_users
from headway.syncs.live import ANNOTATION

PROOF: Final = ANNOTATION + "proof"
END: Final = ANNOTATION + "end"
_RUNTIME: Final = ("cuda_runtime", "cuda_driver")
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_FRAME: Final = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")


@dataclasses.dataclass
class Trace:
    """What a trace holds.

    Attributes:
        waits: blocking calls of the program, times in the trace's clock.
        streams: stream name -> (start, duration, name) in microseconds, in order.
        begin: the end of the last deliberate wait, which is the program's start, in the trace's clock.
        proven: whether the deliberate wait at the start was recorded, so that an empty list means none.
    """

    waits: list[Wait]
    streams: dict[str, list[tuple[float, float, str]]]
    proven: bool
    begin: float = 0.0

    @staticmethod
    def shifted(wait: Wait, micros: float) -> Wait:
        """``wait`` on another clock."""
        return dataclasses.replace(wait, start_ns=int(wait.start_ns + micros * 1000))


class _Intervals:
    """Nested intervals of one thread; finds those around a moment, innermost first."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        self._starts = [event["ts"] for event in self._events]
        self._parents: list[int] = []
        open_: list[int] = []
        for index, event in enumerate(self._events):
            while open_ and _end(self._events[open_[-1]]) < event["ts"]:
                open_.pop()
            self._parents.append(open_[-1] if open_ else -1)
            open_.append(index)

    def around(self, moment: float) -> Iterable[dict[str, Any]]:
        """Events that contain ``moment``, innermost first."""
        index = bisect.bisect_right(self._starts, moment) - 1
        while index >= 0:
            if _end(self._events[index]) >= moment:
                yield self._events[index]
            index = self._parents[index]


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def read(trace: dict[str, Any]) -> Trace:
    """Parse a chrome trace as torch.profiler exports it (CPU and CUDA activities; stacks give lines outside torch calls)."""
    events = [event for event in trace.get("traceEvents", []) if event.get("ph") == "X"]
    annotations: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    frames: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    pageable: set[Any] = set()
    streams: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat"), str(event.get("name", ""))
        if name.startswith(ANNOTATION) and category != "gpu_user_annotation":
            annotations[event["tid"]].append(event)
        elif category == "python_function":
            frames[event["tid"]].append(event)
        elif category in _DEVICE:
            streams[_stream(event)].append((float(event["ts"]), float(event.get("dur", 0)), name))
            if "Pageable" in name:
                pageable.add(event.get("args", {}).get("correlation"))
    ends = [event["ts"] for events in annotations.values() for event in events if event["name"] == END]
    by_line = {thread: _Intervals(found) for thread, found in annotations.items()}
    by_frame = {thread: _Intervals(found) for thread, found in frames.items()}
    nowhere = _Intervals(())
    waits: list[Wait] = []
    marks = [event for found in annotations.values() for event in found if event["name"] == PROOF]
    begin = max(map(_end, marks), default=0.0)
    proven = False
    for event in events:
        kind = _kind(event, pageable)
        if kind is None or (ends and event["ts"] >= min(ends)):
            continue
        around = list(by_line.get(event["tid"], nowhere).around(event["ts"]))
        if any(found["name"] == PROOF for found in around):
            proven = True
            continue
        if event["ts"] < begin:
            continue
        waits.append(_wait(event, kind, around, by_frame.get(event["tid"], nowhere)))
    return Trace(waits, {name: sorted(spans) for name, spans in sorted(streams.items())}, proven, begin)


def _stream(event: dict[str, Any]) -> str:
    arguments = event.get("args", {})
    return f"GPU {arguments.get('device', event.get('pid'))}, stream {arguments.get('stream', event.get('tid'))}"


def _kind(event: dict[str, Any], pageable: set[Any]) -> Kind | None:
    if event.get("cat") not in _RUNTIME:
        return None
    name = str(event["name"])
    if plain(name) in ASYNC_COPIES:
        return Kind.PAGEABLE if event.get("args", {}).get("correlation") in pageable else None
    return blocking(name)


def _wait(event: dict[str, Any], kind: Kind, annotated: list[dict[str, Any]], frames: _Intervals) -> Wait:
    label = plain(str(event["name"]))
    stack = _user_frames(frames.around(float(event["ts"])))
    site = stack[0] if stack else Site("<native thread>", 0, "")
    if annotated:
        file, line, function, _ = json.loads(str(annotated[0]["name"]).removeprefix(ANNOTATION))
        site = Site(str(file), int(line), str(function))
    start = int(float(event["ts"]) * 1000)
    lines = tuple(f"{frame} {frame.function}" for frame in stack[:12])
    return Wait(site, kind, label, float(event.get("dur", 0)), start, str(event["tid"]), "profiler", None, lines)


def _user_frames(events: Iterable[dict[str, Any]]) -> list[Site]:
    """Python frames of the user's, innermost first. The profiler gives a function's first line, not the current one."""
    found = []
    for event in events:
        match = _FRAME.fullmatch(str(event["name"]))
        if match and is_users(match["file"]):
            found.append(Site(match["file"], int(match["line"]), match["function"]))
    return found
