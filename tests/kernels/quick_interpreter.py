"""Triton's interpreter without its longest detour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Let Triton's interpreter prepare its language once a launch.

    Triton 3.6 does so again in every call of a device function, where nothing is left to prepare: a third of a kernel's time.
    """
    from triton import language
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    ready: set[str] = set()

    def prepare_once(fn: Any, *more: Any) -> Any:
        seen = {each.__name__ for each in fn.__globals__.values() if each is language or each is language.core}
        if seen and seen <= ready:
            return interpreter._LangPatchScope()
        ready.update(seen)
        return prepare(fn, *more)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        ready.clear()  # what a launch prepares it takes back at its end
        launch(self, *args, **kwargs)

    with (
        patch.object(interpreter, "_patch_lang", prepare_once),
        patch.object(interpreter.GridExecutor, "__call__", launch_anew),
    ):
        yield
