"""What an operation will return, worked out on meta tensors and remembered."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides, dtype."""

_MANY = 4096


class OutputShapes:
    """Sizes of outputs by operation and arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[Spec], Any]] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Spec], Any]:
        """Specs of the new tensors that ``func`` returns, and what holds them: torch.Tensor, tuple, list; None for an
        operation that returns nothing new."""
        returns = func._schema.returns
        if not returns or all(each.alias_info is not None for each in returns):
            return [], None
        key = (func, _describe(args), tuple((name, _describe(value)) for name, value in kwargs.items()))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MANY:
                self._known.clear()
            found = self._known[key] = _compute(func, args, kwargs)
        return found


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Spec], Any]:
    with torch.inference_mode(), _disable_current_modes():
        result = func(*_meta(args), **{name: _meta(value) for name, value in kwargs.items()})
    several = isinstance(result, list | tuple)
    tensors = list(result) if several else [result]
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise NotImplementedError(
            f"{func} returns something that is not a tensor; the simulated device cannot defer it"
        )
    kind = (tuple if isinstance(result, tuple) else list) if several else torch.Tensor
    return [(tuple(each.shape), each.stride(), each.dtype) for each in tensors], kind


def _meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_meta(each) for each in value)
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _describe(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_describe(each) for each in value)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device.type)
    return (type(value), value)
