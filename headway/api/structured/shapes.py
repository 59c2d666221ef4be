"""What kind of JSON each keyword of a schema has to be. Checked wherever a schema is met, so that nothing behind it has to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from headway.api.structured.regex import RefusedError


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_TEXT: Final = "text", lambda value: isinstance(value, str)
_NUMBER: Final = "a number", _is_number
_OBJECT: Final = "an object", lambda value: isinstance(value, dict)
_SCHEMA: Final = "a schema: an object, true or false", lambda value: isinstance(value, (dict, bool))
_SCHEMAS: Final = "a list of schemas", lambda value: isinstance(value, list)
_NAMES: Final = "a list of names", _is_names

SHAPES: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _NUMBER),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _OBJECT),
    **dict.fromkeys(("items", "additionalProperties"), _SCHEMA),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _SCHEMAS),
    "required": _NAMES,
    "enum": ("a list of values", lambda value: isinstance(value, list)),
    "type": ("a name or a list of names", lambda value: isinstance(value, str) or _is_names(value)),
}
"""Keyword -> what it has to be, in words and as a test."""


def check(schema: Any) -> None:
    """Look at the keywords of one schema, not at those inside it. Raises RefusedError."""
    if not isinstance(schema, (dict, bool)):
        raise RefusedError(f"a schema must be an object, true or false, got {schema!r:.80}")
    if isinstance(schema, dict):
        for name, value in schema.items():
            words, fits = SHAPES.get(name, (None, None))
            if fits is not None and not fits(value):
                raise RefusedError(f"{name} must be {words}, got {value!r:.80}")
