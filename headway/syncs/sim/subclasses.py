"""Classes of tensors that programs and torch itself derive: images, parameters, wrappers, parameters without a shape yet."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn import parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headway.syncs.sim import backend
from headway.syncs.sim.tensor import SimTensor, is_there

_LAZY_KIND: Final[type] = vars(parameter)["UninitializedTensorMixin"]
_KIND: Final = "_kind_on_the_host"
"""In a derived class: the class it was derived from."""
_LAZY: Final = "_belongs_to_the_pretended_device"
"""On a parameter without a shape: where it will be made."""


class _Open(SimTensor):
    """What derived classes inherit from, and reach by ``super()``: torch's own way of keeping the class of results."""


# Set afterwards: torch turns it off as it makes a class with a dispatch of its own.
_Open.__torch_function__ = vars(torch.Tensor)["__torch_function__"]


@functools.cache
def derived(kind: type) -> type:
    """A class of the pretended device's tensors that is ``kind`` too, and whose results stay ``kind``."""
    if issubclass(kind, SimTensor):
        return kind
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    metaclass: Any = type(kind)
    made: Any = metaclass(kind.__name__, (kind, _Open), names | {_KIND: kind})
    first = next(base for base in kind.__mro__ if "__torch_function__" in vars(base))
    made.__torch_function__ = vars(torch.Tensor if first is torch.Tensor else first)["__torch_function__"]
    return made


def of_class(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """``tensor.as_subclass(kind)``: over the same values, in the same graph."""
    if kind in (torch.Tensor, SimTensor, _Open):
        return tensor.view_as(tensor) if type(tensor) is not SimTensor else tensor
    with torch._C.DisableTorchFunction():
        made: Any = tensor.view_as(tensor)
    made.__class__ = derived(kind)
    return made


def _subclass(real: Callable[..., Any]) -> Callable[..., Any]:
    def _make_subclass(cls: type, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        if not isinstance(data, SimTensor):
            return real(cls, data, requires_grad, **kwargs)
        return of_class(data.detach(), cls).requires_grad_(requires_grad)

    return staticmethod(_make_subclass)


def _wrapper(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrappers that a program makes for its device go to the backend's key: this torch may know no CUDA."""

    def there(value: Any) -> Any:
        return backend.device() if isinstance(value, (torch.device, str)) and is_there(value) else value

    def _make_wrapper_subclass(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = there(options["device"])
        return real(*map(there, args), **options)

    return staticmethod(_make_wrapper_subclass)


def _as_subclass(real: Callable[..., Any]) -> Callable[..., Any]:
    def as_subclass(tensor: torch.Tensor, cls: type) -> Any:
        if isinstance(tensor, SimTensor):
            return of_class(tensor, cls)
        return real(tensor, vars(cls).get(_KIND, cls))  # what leaves the device is of the program's own class

    return as_subclass


def _device(real: Any) -> Any:
    """``Tensor.device`` of wrappers of the program's around tensors of the device."""

    def device(tensor: Any) -> torch.device:
        found: torch.device = real.__get__(tensor)
        return backend.visible() if found.type == backend.NAME else found

    return property(device)


def _is_cuda(real: Any) -> Any:
    return property(
        lambda tensor: real.__get__(tensor) or torch._C.TensorBase.device.__get__(tensor).type == backend.NAME
    )


def _materialised(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def materialize(parameter: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        if isinstance(parameter, SimTensor):  # a buffer, whose copy on the device is of a class of its own
            real(parameter, shape, device, dtype)
            parameter.__class__ = SimTensor
            return
        there = is_there(device) if device is not None else getattr(parameter, _LAZY, False)
        real(parameter, shape, torch.device("cpu") if there else device, dtype)
        if there:
            parameter.data = parameter.data.to(backend.device())

    return materialize


def _shapeless(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(kind: type, *args: Any, **options: Any) -> Any:
        there = options.get("device") is not None and is_there(options["device"])
        with torch.device("cpu"):
            made = real(kind, *args, **(options | ({"device": "cpu"} if there else {})))
        setattr(made, _LAZY, there)
        return made

    return make


def _parameter(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: type, data: Any = None, requires_grad: bool = True, **options: Any) -> Any:
        if not isinstance(data, SimTensor) or cls is torch.nn.Parameter:
            return real(cls, data, requires_grad, **options)
        made: Any = of_class(data.detach(), cls).requires_grad_(requires_grad)
        made._is_param = True
        return made

    return make


def without_shape(tensor: Any) -> bool:
    """Whether ``tensor`` waits for its shape."""
    return isinstance(tensor, _LAZY_KIND)


def move(tensor: Any, there: bool) -> None:
    """A parameter without a shape goes to the device, or back: only its mark does."""
    setattr(tensor, _LAZY, there)


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Replace what makes such tensors, process-wide, and put it back."""
    base: Any = torch.Tensor
    core = torch._C.TensorBase
    with contextlib.ExitStack() as undo:
        own = {
            "_make_subclass": _subclass(core._make_subclass),
            "_make_wrapper_subclass": _wrapper(core._make_wrapper_subclass),
            "as_subclass": _as_subclass(core.as_subclass),
            "device": _device(core.device),
            "is_cuda": _is_cuda(core.is_cuda),
        }
        for name, value in own.items():
            setattr(base, name, value)
            undo.callback(delattr, base, name)
        lazy: Any = _LAZY_KIND
        undo.callback(setattr, lazy, "materialize", lazy.materialize)
        lazy.materialize = _materialised(lazy.materialize)
        made: Any
        for made, wrap in (
            (UninitializedParameter, _shapeless),
            (UninitializedBuffer, _shapeless),
            (torch.nn.Parameter, _parameter),
        ):
            undo.callback(setattr, made, "__new__", made.__new__)
            made.__new__ = wrap(made.__new__)
        yield
