"""What the simulated device refuses, always with the line of the program that is to blame."""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from headway.device.base import DeviceError

_REGISTRY = Path(__file__).parents[2] / "kernels" / "registry.py"  # calls every operation; who calls it says more
_INTERNAL = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parent}/",
    str(_REGISTRY),
    copy.deepcopy.__code__.co_filename,
    contextlib.contextmanager.__code__.co_filename,
    "<frozen",
    "<string",
)


class SimError(DeviceError):
    """Something that would fail, stall or corrupt on a real asynchronous device. It stops the engine."""


class HostSyncError(SimError):
    """The host would have waited for the device."""


class RaceError(SimError):
    """Two accesses to the same memory that nothing orders, one of them a write."""


class InvariantError(SimError):
    """An operation was given values that the engine promised never to give it."""


class Place(NamedTuple):
    """A line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        file = "/".join(Path(self.file).parts[-3:])
        return f"{file}:{self.line} in {self.function}: {code}"


NOWHERE = Place("?", 0, "?")


@cache
def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL)


def here() -> Place:
    """The innermost line that belongs neither to torch nor to the simulated device."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if not _is_internal(code.co_filename):
            return Place(code.co_filename, frame.f_lineno, code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return NOWHERE


def need(condition: bool, message: str) -> None:
    """Raise InvariantError unless the condition holds."""
    if not condition:
        raise InvariantError(message)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, not-a-numbers included."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
