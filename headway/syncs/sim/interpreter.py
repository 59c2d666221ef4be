"""What Triton's interpreter gets wrong or cannot do, put right while the simulation runs kernels in it.

It computes with the bits of bfloat16 numbers as if they were integers, cuts where hardware rounds to the nearest even, loses
carries of 8-bit floats, and has no libdevice. Its documentation asks kernels to convert to float32 first; kernels that are made
for a card do not.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

_SAME: Final = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "fmod", "sin", "cos", "tan", "sinh", "cosh", "tanh",
    "floor", "ceil", "trunc", "rint",
)  # fmt: skip
_NUMPY: Final[dict[str, Callable[..., Any]]] = {name: getattr(np, name) for name in _SAME} | {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "pow": np.power,
    "abs": np.abs,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
"""Functions of CUDA's libdevice: name -> the same, on arrays of float32 or float64."""
_ARITHMETIC: Final = ("create_f", "create_min", "create_max", "create_precise")
_FUNCTIONS: Final = frozenset(
    f"create_{name}"
    for name in ("clampf", "cos", "sin", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "floor", "ceil", "dot")
)
_BITS: Final = frozenset(
    {"create_fp_to_fp", "create_fp_ext", "create_fp_trunc", "create_fp_to_si", "create_fp_to_ui", "create_fabs"}
)
"""Conversions, which ``cast_impl`` makes, and what only moves bits."""


def _bits(wide: Any) -> Any:
    """float32 as the bits of bfloat16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _wide(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _eight(name: str) -> Any:
    return {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(name)


def _converter(real: Callable[..., Any], cuts: Any) -> Callable[..., Any]:
    """``_convert_float``: the bits of one type of floats made of those of another."""

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        small = (source.name, target.name)
        if mode == cuts or not any(name == "bf16" or _eight(name) for name in small):
            return real(data, source, target, mode)
        if source.name == "bf16":
            data = _wide(data)
        elif _eight(source.name):
            raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
            data = raw.view(_eight(source.name)).float().numpy()
        if target.name == "bf16":
            return _bits(data.astype(np.float32))
        if _eight(target.name):
            return torch.from_numpy(data.astype(np.float32)).to(_eight(target.name)).view(torch.uint8).numpy()
        return data.astype({"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[target.name])

    return convert


def _cast(real: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    """Between bfloat16 and whole numbers by way of float32."""

    def cast(builder: Any, source: Any, target: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar) and tl.float32 not in (
            source.dtype.scalar,
            target.scalar,
        ):
            source = real(builder, source, tl.float32)
        return real(builder, source, target)

    return cast


def _arithmetic(real: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """An operation on numbers: those of bfloat16 are computed in float32, and rounded."""
    handle, brain = interpreter.TensorHandle, interpreter.tl.bfloat16

    def is_brain(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == brain

    def run(builder: Any, *args: Any) -> Any:
        if not any(map(is_brain, args)):
            return real(builder, *args)
        made = real(
            builder, *(handle(_wide(arg.data), interpreter.tl.float32) if is_brain(arg) else arg for arg in args)
        )
        last = [arg for arg in args if isinstance(arg, handle)][-1]  # of a product the sum, else like the others
        narrow = is_brain(last) and made.data.dtype == np.float32
        return handle(_bits(made.data), brain) if narrow else made

    return run


def _index(real: Callable[..., Any]) -> Callable[..., Any]:
    """Loops over device numbers, whose arrays of one element numpy refuses as bounds from 2.4 on."""

    def patch(tensor: Any, scope: Any) -> None:
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    return patch


def _libdevice(interpreter: Any) -> Callable[..., Any]:
    """A function of libdevice by its name, on the interpreter's blocks."""
    tl = interpreter.tl

    def served(name: str, *args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, tl.tensor))
        arrays = [arg.handle.data if isinstance(arg, tl.tensor) else getattr(arg, "value", arg) for arg in args]
        if name not in _NUMPY or first.handle.data.dtype not in (np.float32, np.float64):
            raise NotImplementedError(f"libdevice.{name} of {first.dtype}")
        made = np.asarray(_NUMPY[name](*arrays), dtype=first.handle.data.dtype)
        kind = tl.block_type(first.dtype, list(made.shape)) if first.type.is_block() else first.type
        return tl.tensor(interpreter.TensorHandle(made, first.dtype), kind)

    return served


def _body(name: str) -> Any:
    """The code of a function that calls its module's ``_simulated`` with its own name."""

    def stub(*args: Any) -> Any:
        return _simulated("", *args)  # type: ignore[name-defined]  # noqa: F821

    code = stub.__code__
    return code.replace(co_name=name, co_consts=tuple(name if each == "" else each for each in code.co_consts))


def mended(undo: contextlib.ExitStack) -> Any:
    """Triton's interpreter, put right until ``undo`` closes."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    extra: Any = importlib.import_module("triton.language.extra.libdevice")
    builder = interpreter.InterpreterBuilder
    cuts = interpreter._ir.ROUNDING_MODE.RTZ
    names: list[tuple[Any, str, Any]] = [
        (interpreter, "_patch_lang_tensor", _index(interpreter._patch_lang_tensor)),
        (interpreter, "_convert_float", _converter(interpreter._convert_float, cuts)),
        (builder, "cast_impl", _cast(builder.cast_impl, interpreter.tl)),
    ]
    for name in dir(builder):
        if (name.startswith(_ARITHMETIC) or name in _FUNCTIONS) and name not in _BITS:
            names.append((builder, name, _arithmetic(getattr(builder, name), interpreter)))
    for owner, name, value in names:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    handle, brain = interpreter.TensorHandle, interpreter.tl.bfloat16
    builder.get_bf16 = lambda self, value: handle(_bits(np.array([value], np.float32)), brain)
    extra._simulated = _libdevice(interpreter)
    undo.callback(delattr, builder, "get_bf16")
    undo.callback(delattr, extra, "_simulated")
    for name, stub in list(vars(extra).items()):
        if inspect.isfunction(stub) and stub.__module__ == extra.__name__:  # kernels may hold them already: new bodies
            undo.callback(setattr, stub, "__code__", stub.__code__)
            stub.__code__ = _body(name)
    return interpreter
