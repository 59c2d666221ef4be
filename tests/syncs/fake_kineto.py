"""What torch.profiler keeps in memory, without a GPU: events that answer as its own do."""

from __future__ import annotations

import dataclasses

from torch._C._autograd import DeviceType

ORIGIN_NS = 1_790_000_000_000_000_000
"""Kineto counts from 1970."""


@dataclasses.dataclass(slots=True)
class FakeEvent:
    """Times in microseconds after ORIGIN_NS."""

    label: str
    begin: float
    micros: float
    lane: int = 9
    correlation: int = 0
    on_device: bool = False
    annotation: bool = False

    def name(self) -> str:
        return self.label

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.on_device else DeviceType.CPU

    def device_index(self) -> int:
        return 0

    def device_resource_id(self) -> int:
        return self.lane

    def start_ns(self) -> int:
        return ORIGIN_NS + round(self.begin * 1000)

    def duration_ns(self) -> int:
        return round(self.micros * 1000)

    def correlation_id(self) -> int:
        return self.correlation

    def is_user_annotation(self) -> bool:
        return self.annotation


def note(label: str, begin: float, micros: float, lane: int = 9) -> FakeEvent:
    """record_function's."""
    return FakeEvent(label, begin, micros, lane, annotation=True)


def call(label: str, begin: float, micros: float, lane: int = 9, correlation: int = 0) -> FakeEvent:
    """A call into CUDA."""
    return FakeEvent(label, begin, micros, lane, correlation)


def work(label: str, begin: float, micros: float, stream: int = 7, correlation: int = 0) -> FakeEvent:
    """A kernel or a copy."""
    return FakeEvent(label, begin, micros, stream, correlation, on_device=True)


@dataclasses.dataclass
class FakeResults:
    """``profile.profiler.kineto_results``."""

    made: list[FakeEvent]

    def events(self) -> list[FakeEvent]:
        return self.made
