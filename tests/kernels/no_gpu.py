"""Stands for Triton's driver of a Hopper GPU on machines without one: kernels compile, load and launch, but do nothing.

Only for processes without Triton's interpreter, which replaces what is tested with it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget

HOPPER = GPUTarget("cuda", 90, 32)


class NoDriver:
    """The driver.

    Attributes:
        launched: names of the launched kernels.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, binary, shared, device: (None, None, 32, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What launches a kernel with the types of ``source``."""
        return lambda *arguments: self.launched.append(source.fn.fn.__name__)

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0
