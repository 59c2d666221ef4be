"""Tensors of the simulated device: they claim the meta device, hold real CPU memory, and give no value to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl

from headway.device.sim.errors import here
from headway.device.sim.memory import Handle

if TYPE_CHECKING:
    from headway.device.sim.ops import Operations


class SimTensor(torch.Tensor):
    """A view of device memory.

    Attributes:
        data_on_device: the CPU tensor behind it; tasks read and write it when they run.
        handle: shared by all tensors over the same memory.
        operations: of the device it lives on.
        span: bytes [low, high) of its memory, once somebody asked.
    """

    data_on_device: torch.Tensor
    handle: Handle
    operations: Operations
    span: tuple[int, int] | None

    @staticmethod
    def __new__(cls, data: torch.Tensor, handle: Handle, operations: Operations) -> SimTensor:
        with torch.inference_mode(
            False
        ):  # a view of a tensor made outside of inference mode must not be an inference tensor
            made: SimTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                data.shape,
                strides=data.stride(),
                storage_offset=data.storage_offset(),
                dtype=data.dtype,
                device=torch.device("meta"),
            )
        made.data_on_device, made.handle, made.operations, made.span = data, handle, operations, None
        return made

    def __init__(self, data: torch.Tensor, handle: Handle, operations: Operations) -> None:
        super().__init__()

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _operations_of(args, kwargs or {}).call(func, args, kwargs or {})

    def _refuse(self, what: str) -> NoReturn:
        self.operations.timeline.refuse(f"{what} at {here()}")
        raise AssertionError("refuse raises")

    # What torch answers without asking the dispatcher, or asks it too late to say which call was to blame.

    def item(self) -> NoReturn:
        self._refuse(".item() reads a device value")

    def tolist(self) -> NoReturn:
        self._refuse(".tolist() reads device values")

    def cpu(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(".cpu() copies to the host and waits; use Readback")

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(".numpy() reads device values")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("numpy reads device values")

    def __bool__(self) -> bool:  # noqa: PLE0304
        self._refuse("bool() (an `if`, `and`, `assert`...) reads a device value")

    def __int__(self) -> NoReturn:
        self._refuse("int() reads a device value")

    def __float__(self) -> NoReturn:
        self._refuse("float() reads a device value")

    def __index__(self) -> int:  # noqa: PLE0305
        self._refuse("use as an index or a size reads a device value")

    def __complex__(self) -> NoReturn:
        self._refuse("complex() reads a device value")

    def __contains__(self, element: object) -> NoReturn:
        self._refuse("`in` reads device values")

    def __iter__(self) -> NoReturn:
        self._refuse("a host loop over a device tensor; use unbind, or one operation for all")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._refuse("printing reads device values")

    def __format__(self, spec: object) -> str:
        self._refuse("formatting reads device values")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("serialising reads device values")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("copy.deepcopy() of device memory")

    def data_ptr(self) -> NoReturn:
        self._refuse(".data_ptr() hands device memory to code that the simulation cannot see")

    def untyped_storage(self) -> NoReturn:
        self._refuse(".untyped_storage() hands device memory to code that the simulation cannot see")

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self.operations.build(torch.tensor, (data,), {"dtype": self.dtype} | kwargs, "new_tensor(...)")

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        scalar = isinstance(value, int | float | complex)
        if any(isinstance(part, list | torch.Tensor | np.ndarray) for part in parts):
            if scalar or any(_is_mask(part) for part in parts):
                self._refuse(
                    "x[tensor] = number (or x[mask] = ...) waits; use index_fill_, masked_fill_ or torch.where"
                )
        elif scalar and len(parts) == self.dim() and all(_is_int(part) for part in parts):
            self._refuse("x[i] = number copies it from pageable memory; assign to a slice or use fill_")
        super().__setitem__(index, value)


def _is_int(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _is_mask(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _operations_of(args: Any, kwargs: Any) -> Operations:
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, SimTensor):
                return each.operations
    raise AssertionError("dispatched without a simulated tensor")


class PinnedTensor(torch.Tensor):
    """Page-locked host memory. Plain CPU memory, but the host's looks at it are seen."""

    operations: Operations
    """Set on a subclass that each device makes for itself: slices must know their device too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is torch.Tensor and result.device.type == "cpu" else result

    def numpy(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        """A view. Raises RaceError while a copy into the buffer is not known to be over."""
        self.operations.host_access(self)
        return self.as_subclass(torch.Tensor).numpy()

    def tolist(self) -> Any:
        """The values. Raises as ``numpy`` does."""
        return self.numpy().tolist()

    def is_pinned(self, device: Any = None) -> bool:
        """Always."""
        return True
