"""Triton's interpreter without its longest detours."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Let Triton's interpreter do once what it does again with every operation of a kernel: two thirds of its time.

    Triton 3.6 prepares its language in every call of a device function, where nothing is left to prepare; looks for overflows
    of integers in arithmetic of its own, of which it asserts the result in debug mode only; and wraps each block's shape anew.
    """
    from triton import language
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    ready: set[str] = set()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(each.__name__ for each in fn.__globals__.values() if each is language or each is language.core)

    def prepare_once(fn: Any, *more: Any) -> Any:
        seen = languages(fn)
        if seen and seen <= ready:
            return interpreter._LangPatchScope()
        ready.update(seen)
        return prepare(fn, *more)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        ready.clear()  # what a launch prepares it takes back at its end
        launch(self, *args, **kwargs)

    builder, semantic = interpreter.interpreter_builder, language.semantic.TritonSemantic
    with ExitStack() as stack:
        for changed, name, new in (
            (interpreter, "_patch_lang", prepare_once),
            (interpreter.GridExecutor, "__call__", launch_anew),
            (interpreter, "_get_np_dtype", numpy_types_by_name(interpreter._get_np_dtype)),
            (language.core.block_type, "__init__", blocks_of_known_shapes(language.core)),
            (language.core.tensor, "__init__", tensors_of_known_shapes(language.core)),
            (semantic, "broadcast_impl_value", broadcast_of_unequal_blocks(semantic.broadcast_impl_value)),
        ):
            stack.enter_context(patch.object(changed, name, new))
        if not builder.options.debug:
            unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
            stack.enter_context(patch.object(builder, "options", unchecked))
        yield


def numpy_types_by_name(original: Any) -> Any:
    """``_get_np_dtype``, which builds the table of all types to look one up."""
    known: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if dtype.is_block() else dtype
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return get_np_dtype


def blocks_of_known_shapes(core: Any) -> Any:
    """``block_type.__init__`` that checks each shape once."""
    original, known = core.block_type.__init__, dict[tuple[int, ...], Any]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in known:
            original(self, element_ty, shape)
            known[key] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, words = known[key]
        self.name = f"<{words}, {element_ty}>"

    return init


def tensors_of_known_shapes(core: Any) -> Any:
    """``tensor.__init__`` that wraps each shape once."""
    known: dict[tuple[int, ...], Any] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in known:
            known[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = known[sizes]

    return init


def broadcast_of_unequal_blocks(original: Any) -> Any:
    """``broadcast_impl_value`` that leaves blocks of one shape as they are without a look at each size."""

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast_impl_value
