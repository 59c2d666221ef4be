"""What torch.profiler recorded, taken from its memory: annotations, calls into CUDA, the device's work.

Not through the JSON file that it can export: a quote in an annotation's name makes that file invalid, and a long run makes
it hundreds of megabytes.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch._C._autograd import DeviceType

from headway.syncs.errors import ProbeError

MAX_WORK: Final = 1_000_000
"""Pieces of device work kept; a longer recording says how many more it had."""
_CUDA_CALL: Final = re.compile(r"cu(da)?[A-Z]")


class Event(NamedTuple):
    """Something with a beginning and a duration, in microseconds of the recording's own clock.

    Attributes:
        lane: of the host: the thread's id, as the system counts; of the device: the stream.
        correlation: the same for a call and the work that it asked for.
    """

    name: str
    lane: int
    start: float
    micros: float
    device: int = 0
    correlation: int = 0

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.micros


@dataclasses.dataclass
class Recording:
    """Events in the order in which they began.

    Attributes:
        annotations: those asked for by prefix.
        calls: calls into the CUDA runtime and driver, those asked for by name.
        work: kernels, copies and fills, the first MAX_WORK of them.
        unread: how many more there were.
        pageable: correlations of all copies from or to pageable memory.
    """

    annotations: list[Event] = dataclasses.field(default_factory=list)
    calls: list[Event] = dataclasses.field(default_factory=list)
    work: list[Event] = dataclasses.field(default_factory=list)
    unread: int = 0
    pageable: set[int] = dataclasses.field(default_factory=set)


def read(results: Any, prefix: str, wanted: Callable[[str], bool], max_work: int = MAX_WORK) -> Recording:
    """What ``profile.profiler.kineto_results`` holds.

    Args:
        prefix: of the names of the annotations to keep.
        wanted: which calls to keep, by their full names.
    """
    found, names = Recording(), dict[str, str]()
    events = results.events()
    origin = min((event.start_ns() for event in events), default=0)  # a float of today's nanoseconds would lose some
    for event in events:
        name = event.name()
        on_device = event.device_type() != DeviceType.CPU
        if on_device and not event.is_user_annotation():
            if "Pageable" in name:
                found.pageable.add(event.correlation_id())
            if len(found.work) >= max_work:
                found.unread += 1
                continue
            into = found.work
        elif not on_device and name.startswith(prefix):
            into = found.annotations
        elif not on_device and _CUDA_CALL.match(name) and wanted(name):
            into = found.calls
        else:
            continue
        into.append(
            Event(
                names.setdefault(name, name),
                event.device_resource_id(),
                (event.start_ns() - origin) / 1000,
                event.duration_ns() / 1000,
                event.device_index(),
                event.correlation_id(),
            )
        )
    for into in (found.annotations, found.calls, found.work):
        into.sort(key=lambda event: (event.start, -event.micros))
    return found


def activities() -> list[Any]:
    """The host's and the device's side.

    Raises:
        ProbeError: no CUDA, or this torch cannot record it.
    """
    if not torch.cuda.is_available():
        raise ProbeError("the profiler has no CUDA device to record")
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise ProbeError("this torch is built without CUPTI: torch.profiler cannot record CUDA calls")
    return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


def profile(kinds: list[Any]) -> Any:
    """A torch.profiler.profile of these activities on all threads, without Python stacks.

    Stacks would record every Python call: importing a large package makes millions.
    """
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - no public way
    return _Profile(activities=kinds, experimental_config=threads)


class _Profile(torch.profiler.profile):
    """Without torch 2.11's warning at the first cycle that earlier ones, of which there are none, were cleared."""

    def prepare_trace(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
            super().prepare_trace()
