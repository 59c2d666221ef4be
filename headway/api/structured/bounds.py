"""The bounds that a schema sets to numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from headway.api.structured.regex import RefusedError


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # a float holds no integer of 400 digits


def _checked_bounds(schema: dict[str, Any]) -> Iterator[tuple[str, Fraction]]:
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema:
            value = schema[name]
            if not _is_finite(value):
                raise RefusedError(f"{name} must be a number, got {value!r:.80}")
            yield name, Fraction(repr(value))


def ends(
    schema: dict[str, Any], inclusive: str, exclusive: str, narrower: Callable[..., Any]
) -> tuple[Fraction | None, bool]:
    """The bound on one side, and whether it is left out itself."""
    given = dict(_checked_bounds(schema))
    ends = [(given[name], name == exclusive) for name in (inclusive, exclusive) if name in given]
    if not ends:
        return None, False
    bound = narrower(value for value, _ in ends)
    return bound, any(open_ for value, open_ in ends if value == bound)


def whole_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Lowest and highest integer that the bounds leave."""
    given = dict(_checked_bounds(schema))
    lows = [math.ceil(given["minimum"])] if "minimum" in given else []
    lows += [math.floor(given["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in given else []
    highs = [math.floor(given["maximum"])] if "maximum" in given else []
    highs += [math.ceil(given["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in given else []
    return max(lows, default=None), min(highs, default=None)


def factor(value: Any) -> int:
    """The whole number that all values are multiples of."""
    if not value > 0 or not _is_finite(value):
        raise RefusedError(f"multipleOf must be a number above 0, got {value!r:.80}")
    if value != int(value):
        raise RefusedError(
            "multipleOf of a fraction is not supported: validators disagree on it; use integers, or a pattern"
        )
    return int(value)
