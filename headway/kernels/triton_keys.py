"""Names kernels in Triton's cache the same way in every process.

Triton names a kernel by a hash of its source, of its callees' and of the constants that these use. It takes a callee's
constants as they are known before it has looked at that callee, so the name depends on which functions were hashed before: on
the order in which threads compile, or on what else a process compiled. Two processes then miss each other's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable


def settle_key(function: Any) -> None:
    """Hash ``function``, its callees first."""
    _settle(function, set())


def _settle(function: Any, seen: set[int]) -> None:
    seen.add(id(function))
    if function.hash is not None:
        return
    for callee in _callees(function):
        if id(callee) not in seen:
            _settle(callee, seen)
    _ = function.cache_key


def _callees(function: Any) -> Iterator[Any]:
    """The functions for kernels among the names that ``function`` mentions."""
    names, known = function.fn.__code__.co_names, function.__globals__
    found = [known[name] for name in names if name in known]
    found += [getattr(each, name, None) for each in found if isinstance(each, ModuleType) for name in names]
    yield from (each for each in found if isinstance(each, JITCallable))
