"""The keywords of JSON schemas that are honoured, and what they say of a schema's types."""

from __future__ import annotations

from typing import Any

from headway.api.structured import shapes
from headway.api.structured.merge import Resolve
from headway.api.structured.regex import RefusedError

NOTES = frozenset(
    [
        *(
            "title",
            "description",
            "default",
            "examples",
            "example",
            "deprecated",
            "readOnly",
            "writeOnly",
            "discriminator",
        ),
        *("$comment", "$schema", "$id", "$defs", "definitions", "$anchor"),
    ]
)
"""Keywords that say nothing about the text."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OWN_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(_BOUNDS),
    "number": frozenset(_BOUNDS),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
    ),
}
COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
KNOWN = NOTES | frozenset().union(*OWN_KEYWORDS.values()) | {"type", "enum", "const", *COMBINATIONS}


def asked_types(schema: dict[str, Any]) -> list[str] | None:
    """The types asked for; None when the keyword is absent."""
    if "type" not in schema:
        return None
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in types:
        if name not in OWN_KEYWORDS:
            raise RefusedError(f"type {name!r:.80} is none of {', '.join(OWN_KEYWORDS)}")
    if not types:
        raise RefusedError("type must name at least one type")
    return types


def check_disjoint(branches: list[Any], resolve: Resolve) -> None:
    """oneOf means exactly one: types, values, or a property that all objects must have, must tell the branches apart."""
    seen: set[str] = set()
    for branch in branches:
        shapes.check(branch)
    marks = [_marks(branch, resolve) for branch in branches]
    by_type = all(each is not None for each in marks)
    for each in marks:
        if not by_type or each is None or each & seen:
            by_type = False
            break
        seen |= each
    if not by_type and not _told_apart(branches, resolve):
        raise RefusedError("the branches of a oneOf may overlap; use anyOf")


def _told_apart(branches: list[Any], resolve: Resolve) -> bool:
    """Whether all are objects with one required property of constant, different values."""
    whole = [resolve(each["$ref"]) if isinstance(each, dict) and "$ref" in each else each for each in branches]
    if not all(isinstance(each, dict) and each.get("type") == "object" for each in whole):
        return False
    for name in whole[0].get("properties", {}):
        values: list[str] = []
        for each in whole:
            value = each.get("properties", {}).get(name)
            if not isinstance(value, dict) or name not in each.get("required", []):
                break
            shapes.check(value)
            values += [repr(v) for v in ([value["const"]] if "const" in value else value.get("enum") or [])] or [
                "?",
                "?",
            ]
        else:
            if len(set(values)) == len(values) and all(value.startswith("'") for value in values):
                return True
    return False


def _marks(schema: Any, resolve: Resolve) -> set[str] | None:
    """Names of disjoint sets of values that cover the schema's; None when unknown."""
    if isinstance(schema, dict) and "$ref" in schema and schema.keys() <= {"$ref"} | NOTES:
        schema = resolve(schema["$ref"])
    if not isinstance(schema, dict):
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        plain = isinstance(values, list) and all(isinstance(v, str) for v in values)
        return {f"string:{value}" for value in values} if plain else None
    types = asked_types(schema)
    if types is None:
        return None
    return {"number" if name == "integer" else name for name in types}
