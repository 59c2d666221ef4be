"""The pretended device as a backend of torch's: the dispatch key that torch keeps for backends from outside (PrivateUse1).

Registered once for the process, and only when somebody simulates: torch knows no way to unregister it. Its tensors are no
meta tensors, so a program's own meta tensors stay what they are, and torch's short cuts for meta tensors do not apply.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from headway.syncs.errors import ProbeError
from headway.syncs.sim.attention import OPERATION, attended

NAME: Final = "simulated"
"""What torch's C++ side calls the device; programs see "cuda"."""


class State:
    """What the process has of the backend.

    Attributes:
        kept: what torch holds by address only; empty before the backend is registered.
        unserved: what programs asked for in vain: a program may swallow the error, but its run proves nothing.
        index: of the card that this process uses: a process has one, and each rank of a launcher another.
    """

    def __init__(self) -> None:
        self.index = 0
        self.kept: list[Any] = []
        self.unserved: list[str] = []


STATE: Final = State()


class Astray(threading.local):
    """An error of Python's that torch's engine has lost on this thread."""

    error: BaseException | None = None


ASTRAY: Final = Astray()
_pending: Final = ctypes.pythonapi["PyErr_Occurred"]  # a function object of our own
_pending.restype = ctypes.c_void_p


def set_aside() -> None:
    """Keep an error that is on its way through C++, where Python must not be called before it has arrived.

    Torch asks the guard for its type while it leaves a frame because of an error. Python answers such a call with another
    error, which ends the process (torch 2.11) or loses the first (2.13). ctypes raises what is pending after any call.
    """
    try:
        _pending()
    except BaseException as error:
        ASTRAY.error = error


def refuse(message: str) -> ProbeError:
    """An error to raise where the simulation cannot go on."""
    STATE.unserved.append(message)
    return ProbeError(message)


class _Module:
    """What torch asks of a backend's Python module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The CPU's generator makes this device's random numbers, and is seeded by itself."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def cards() -> int:
    """How many cards the pretended machine has: one for each rank that a launcher started on it."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def visible() -> torch.device:
    """What a program sees."""
    return torch.device("cuda", STATE.index)


def use(card: Any) -> None:
    """``torch.cuda.set_device``.

    Raises:
        RuntimeError: there is no such card.
    """
    index = card if isinstance(card, int) else torch.device(card).index
    if index is None or index < 0:
        return
    if index >= cards():
        raise RuntimeError("CUDA error: invalid device ordinal")
    STATE.index = index


def device() -> torch.device:
    """What torch's C++ side knows the pretended device by. Needs ``register`` first."""
    return torch.device(NAME, 0)


def register(execute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Make the backend known; ``execute(operation, args, kwargs)`` runs whatever arrives at its dispatch key.

    Raises:
        ProbeError: this torch has no backends written in Python, or the program's own backend has the key.
    """
    if STATE.kept:
        return
    accelerators: Any = getattr(torch._C, "_acc", None)
    if not hasattr(accelerators, "register_python_privateuseone_device_guard"):
        raise ProbeError(
            f"torch {torch.__version__} cannot host a backend written in Python: the simulation needs torch 2.11 or later"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise ProbeError(
            f"the simulation needs the dispatch key PrivateUse1, which backend {taken!r} has already taken"
        )

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            set_aside()
            return torch._C._autograd.DeviceType.PrivateUse1

    library = torch.library.Library("_", "IMPL")
    hook, guard = Hook(), Guard()
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())
    accelerators.register_python_privateuseone_hook(hook)
    accelerators.register_python_privateuseone_device_guard(guard)
    aten = torch.library.Library("aten", "IMPL")
    aten.impl(OPERATION, attended, f"Autograd{NAME_OF_KEY}")
    library.fallback(lambda operation, *args, **kwargs: execute(operation, args, kwargs), NAME_OF_KEY)
    STATE.kept.extend([library, aten, hook, guard])


NAME_OF_KEY: Final = "PrivateUse1"
