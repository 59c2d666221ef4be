"""Command-line options from an annotated dataclass: one option a field, as ``typer.Option`` in its annotation says."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from typer.core import TyperCommand


def takes(cls: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command whose only parameter is an instance of the dataclass ``cls`` gets an option for each field."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(cls, include_extras=True)
        parameters = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=hints[field.name]
            )
            for field in dataclasses.fields(cls)
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            lists: dict[str, Any] = {
                name: [] for name, value in values.items() if value is None and "list" in str(hints[name])
            }
            command(cls(**{**values, **lists}))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        del run.__wrapped__  # typer must read the signature above
        return run

    return decorate


def spread(*options: str) -> type[TyperCommand]:
    """A command whose repeatable ``options`` take several values in a row, as argparse's do: ``--goodput ttft:9 tpot:2``."""

    class Spread(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, repeated(args, options))

    return Spread


def repeated(args: list[str], options: tuple[str, ...]) -> list[str]:
    """``args`` with an option of ``options`` before each of its values."""
    found: list[str] = []
    option, first = "", False
    for word in args:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            option, first = (name, not equals) if name in options else ("", False)
        elif option:
            found += [] if first else [option]
            first = False
        found.append(word)
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value an option has when it is not given; None for an empty list, as typer wants it."""
    return field.default if field.default is not dataclasses.MISSING else None
