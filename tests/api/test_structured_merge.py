"""Two schemas as one: random pairs, judged by jsonschema, value for value."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from headway.api.structured.merge import MAX_BRANCHES, flattened, merged
from headway.api.structured.regex import RefusedError

NUMBERS: list[Any] = [-2, 0, 1, 2, 3, 5, 1.5, 2.5]
TEXTS: list[Any] = ["", "a", "ab", "abc", "abcd"]
LISTS: list[Any] = [[], [1], [1, 2], ["a"], [1, 2, 3], [5, "ab"]]
OBJECTS: list[Any] = [
    {}, {"a": 1}, {"a": "ab"}, {"b": 2}, {"a": 1, "b": 2}, {"a": 5, "c": "a"}, {"a": 1, "b": "x", "c": None}, {"x": 3},
]  # fmt: skip
VALUES = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
DEFS = {"small": {"type": "integer", "maximum": 2}, "named": {"type": "object", "required": ["a"]}, "any": True}
LIMITS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]


def resolve(reference: str) -> Any:
    return DEFS[reference.removeprefix("#/$defs/")]


def schema(rng: random.Random, depth: int = 2) -> Any:
    """Some keywords of all kinds; few, so that many values pass."""
    if rng.random() < 0.08:
        return rng.choice([True, False, {}])
    found: dict[str, Any] = {}
    for _ in range(rng.choice([1, 1, 2, 3])):
        match rng.randrange(11 if depth else 6):
            case 0:
                found["type"] = rng.choice([rng.choice(TYPES), rng.sample(TYPES, 4)])
            case 1:
                found["enum"] = rng.sample(VALUES, 14)
            case 2:
                found[rng.choice(LIMITS)] = rng.choice(NUMBERS)
            case 3 | 4:
                found[rng.choice(COUNTS)] = rng.randrange(4)
            case 5:
                found["required"] = rng.sample(["a", "b", "c"], rng.choice([1, 2]))
            case 6:
                found["items"] = schema(rng, depth - 1)
                if rng.random() < 0.5:
                    found["prefixItems"] = [schema(rng, depth - 1) for _ in range(rng.choice([1, 2]))]
            case 7:
                found["properties"] = {name: schema(rng, depth - 1) for name in rng.sample(["a", "b", "c"], 2)}
                if rng.random() < 0.5:
                    found["additionalProperties"] = rng.choice([True, False, schema(rng, depth - 1)])
            case 8:
                found[rng.choice(["anyOf", "oneOf"])] = [schema(rng, depth - 1) for _ in range(rng.choice([1, 2, 3]))]
            case 9:
                found["$ref"] = f"#/$defs/{rng.choice([*DEFS])}"
            case 10:
                found["allOf"] = [schema(rng, depth - 1) for _ in range(rng.choice([1, 2]))]
    return found


def passing(whole: Any) -> list[bool]:
    with_defs = {"allOf": [whole], "$defs": DEFS}
    judge = jsonschema.Draft202012Validator(with_defs)
    return [judge.is_valid(value) for value in VALUES]


@pytest.mark.parametrize("seed", range(8))
def test_what_passes_both_passes_the_one(seed: int) -> None:
    """And nothing else does. What cannot be said in one schema is refused with a known reason."""
    rng, compared = random.Random(seed), 0
    for _ in range(120):
        left, right = schema(rng), schema(rng)
        wanted = [a and b for a, b in zip(passing(left), passing(right), strict=True)]
        both, refused = None, ""
        try:
            both = merged(left, right, resolve)
        except RefusedError as error:
            refused = str(error)
        if refused:
            assert any(part in refused for part in ("at once", "nothing is both", "no value in common")), refused
            continue
        assert passing(both) == wanted, (left, right, both)
        compared += 1 < sum(wanted) < len(VALUES) - 1
    assert compared > 15


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ({"type": "string"}, {"type": "integer"}, "nothing is both"),
        ({"type": ["null", "string"]}, {"type": ["boolean", "number"]}, "nothing is both"),
        ({"enum": [1, "a"]}, {"enum": [True, "b", 1.0]}, "no value in common"),
        ({"minimum": 2}, {"minimum": True}, "minimum must be a number"),
        ({"maxLength": "3"}, {"maxLength": 2}, "maxLength must be a number"),
        ({"pattern": "a"}, {"pattern": "b"}, "two different 'pattern'"),
        ({"anyOf": [{}]}, {"oneOf": [{}]}, "two lists of alternatives"),
        ({"anyOf": [{}], "oneOf": [{}]}, {"oneOf": [{}]}, "two lists of alternatives"),
        ({"patternProperties": {"^a": True}}, {"patternProperties": {"^b": True}}, "two different 'patternProperties'"),
        ({"patternProperties": {"^a": True}}, {"properties": {"b": True}}, "beside other properties"),
        ({"allOf": []}, {"type": "string"}, "at least one schema"),
        ({"allOf": {}}, {"type": "string"}, "allOf must be a list"),
    ],
)
def test_what_is_refused(left: Any, right: Any, says: str) -> None:
    for one, other in ((left, right), (right, left)):
        with pytest.raises(RefusedError, match=says):
            merged(one, other, resolve)


def test_alternatives_are_combined_up_to_a_limit() -> None:
    eight, nine = [{"enum": [each, 99]} for each in range(8)], [{"enum": [each, 99]} for each in range(9)]
    assert len(merged({"anyOf": eight}, {"anyOf": eight}, resolve)["anyOf"]) == MAX_BRANCHES == 64
    with pytest.raises(RefusedError, match="combinations"):
        merged({"anyOf": eight}, {"anyOf": nine}, resolve)


def test_what_refers_to_itself_ends() -> None:
    with pytest.raises(RefusedError, match="refers to itself"):
        merged({"$ref": "#"}, {"minimum": 1}, lambda _: {"$ref": "#", "maximum": 2})
    deep: Any = {"minimum": 1}
    for _ in range(15):
        deep = {"allOf": [deep], "maximum": 5}
    assert flattened(deep, resolve) == {"minimum": 1, "maximum": 5}


def test_what_says_nothing_of_values_is_kept() -> None:
    both = merged({"title": "A", "default": 1, "$defs": {"x": True}}, {"title": "B", "$defs": {"y": False}}, resolve)
    assert both == {"title": "A", "default": 1, "$defs": {"x": True, "y": False}}
    assert merged({"patternProperties": {"^a": {"minimum": 1}}}, {"maxProperties": 2}, resolve) == {
        "patternProperties": {"^a": {"minimum": 1}}, "maxProperties": 2,
    }  # fmt: skip
