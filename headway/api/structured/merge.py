"""Two schemas that must both hold, as one schema: for ``allOf``, and for keywords beside ``$ref``, ``anyOf`` and ``oneOf``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.api.structured import shapes
from headway.api.structured.regex import RefusedError

MAX_BRANCHES = 64
Resolve = Callable[[str], Any]

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_MAPS = ("properties", "patternProperties")
NAMES = frozenset(("title", "description", "default", "examples", "example", "$comment", "$id", "$anchor", "$schema"))


def merged(left: Any, right: Any, resolve: Resolve, depth: int = 0) -> Any:
    """A schema whose values satisfy both.

    Args:
        resolve: what a ``$ref`` points to.

    Raises:
        RefusedError: nothing satisfies both, or it is not known how to say it in one schema.
    """
    if depth > 32:
        raise RefusedError("what allOf joins refers to itself")
    for each in (left, right):
        shapes.check(each)
    if left is True or left == {}:
        return right
    if right is True or right == {}:
        return left
    if left is False or right is False:
        return False
    for one, other in ((left, right), (right, left)):
        if "$ref" in one:
            rest = {name: value for name, value in one.items() if name != "$ref"}
            whole = merged(resolve(one["$ref"]), rest, resolve, depth + 1)
            return merged(whole, other, resolve, depth + 1)
        if "allOf" in one:
            return merged(flattened(one, resolve, depth + 1), other, resolve, depth + 1)
    found = _without_branches(left, right, resolve, depth)
    choices = [(name, each[name]) for each in (left, right) for name in ("anyOf", "oneOf") if name in each]
    if len(choices) > 1:
        (name, first), (name2, second) = choices[:2]
        if len(choices) > 2 or name != name2 or len(first) * len(second) > MAX_BRANCHES:
            raise RefusedError("two lists of alternatives hold at once; write their combinations out in one anyOf")
        found[name] = [merged(a, b, resolve, depth + 1) for a in first for b in second]
    elif choices:
        found[choices[0][0]] = choices[0][1]
    return found


def flattened(schema: dict[str, Any], resolve: Resolve, depth: int = 0) -> Any:
    """``schema`` without its ``allOf``."""
    parts = schema["allOf"]
    if not parts:
        raise RefusedError("allOf must be a list of at least one schema")
    whole: Any = {name: value for name, value in schema.items() if name != "allOf"}
    for part in parts:
        whole = merged(whole, part, resolve, depth + 1)
    return whole


def _without_branches(left: dict[str, Any], right: dict[str, Any], resolve: Resolve, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*left, *(name for name in right if name not in left)):
        if name in ("anyOf", "oneOf", *_MAPS, "additionalProperties", "prefixItems", "items"):
            continue
        if name not in left or name not in right:
            found[name] = left[name] if name in left else right[name]
        else:
            found[name] = _both(name, left[name], right[name])
    if any(name in each for each in (left, right) for name in (*_MAPS, "additionalProperties")):
        _join_properties(found, left, right, resolve, depth)
    _join_items(found, left, right, resolve, depth)
    return found


def _both(name: str, a: Any, b: Any) -> Any:
    """One keyword that both have."""
    if a == b or name in NAMES:
        return a
    if name == "type":
        ours, theirs = (set(each if isinstance(each, list) else [each]) for each in (a, b))
        both = ours & theirs | ({"integer"} if {"integer"} & (ours | theirs) and "number" in ours | theirs else set())
        if "integer" in both and not ({"integer", "number"} & ours and {"integer", "number"} & theirs):
            both.discard("integer")
        if not both:
            raise RefusedError(f"nothing is both {a!r:.60} and {b!r:.60}")
        return sorted(both)
    if name == "enum":
        both_values = [value for value in a if any(type(value) is type(each) and value == each for each in b)]
        if not both_values:
            raise RefusedError("two enums that must both hold have no value in common")
        return both_values
    if name in _LOWER or name in _UPPER:
        return max(a, b) if name in _LOWER else min(a, b)
    if name == "required":
        return list(dict.fromkeys([*a, *b]))
    if name in ("$defs", "definitions"):
        return {**a, **b}
    raise RefusedError(f"two different {name!r:.80} hold at once; write them as one")


def _join_items(
    found: dict[str, Any], left: dict[str, Any], right: dict[str, Any], resolve: Resolve, depth: int
) -> None:
    """Items of both: a place that one of them has no ``prefixItems`` for meets that one's ``items``."""
    prefixes = [each.get("prefixItems", []) for each in (left, right)]
    if longest := max(map(len, prefixes)):
        places = [
            [prefix[i] if i < len(prefix) else each.get("items", True) for i in range(longest)]
            for prefix, each in zip(prefixes, (left, right), strict=True)
        ]
        found["prefixItems"] = [_one(a, b, resolve, depth) for a, b in zip(*places, strict=True)]
    if "items" in left or "items" in right:
        found["items"] = _one(left.get("items", True), right.get("items", True), resolve, depth)


def _one(a: Any, b: Any, resolve: Resolve, depth: int) -> Any:
    return a if a == b else merged(a, b, resolve, depth + 1)


def _join_properties(
    found: dict[str, Any], left: dict[str, Any], right: dict[str, Any], resolve: Resolve, depth: int
) -> None:
    """Properties of both: a name that one of them does not have meets that one's ``additionalProperties``."""
    patterns = [each["patternProperties"] for each in (left, right) if each.get("patternProperties")]
    if len(patterns) == 2 and patterns[0] != patterns[1]:
        raise RefusedError("two different 'patternProperties' hold at once; write them as one")
    if patterns and any(each.get("properties") or "additionalProperties" in each for each in (left, right)):
        pattern_side = left if left.get("patternProperties") else right
        if (right if pattern_side is left else left).get("properties"):
            raise RefusedError("'patternProperties' beside other properties in an allOf is not supported")
    properties: dict[str, Any] = {}
    for each, other in ((left, right), (right, left)):
        for name, value in each.get("properties", {}).items():
            if name in properties:
                continue
            theirs = other.get("properties", {}).get(name, other.get("additionalProperties", True))
            properties[name] = merged(value, theirs, resolve, depth + 1)
    if properties or "properties" in left or "properties" in right:
        found["properties"] = properties
    if patterns:
        found["patternProperties"] = patterns[0]
    if "additionalProperties" in left or "additionalProperties" in right:
        ours, theirs = left.get("additionalProperties", True), right.get("additionalProperties", True)
        found["additionalProperties"] = merged(ours, theirs, resolve, depth + 1)
