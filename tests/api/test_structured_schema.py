"""Schemas as automata: every accepted text is JSON that validates, every keyword is honoured or refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from headway.api.structured.compile import Outcome, Task, compile_task
from headway.core.automaton import Automaton
from tests.api.test_structured_regex import ALL_BYTES, walk_randomly


def outcome(schema: Any) -> Outcome:
    return compile_task(Task("json", schema if isinstance(schema, str) else json.dumps(schema), ALL_BYTES))


def compiled(schema: Any) -> Automaton:
    found = outcome(schema)
    assert found.automaton is not None, found
    found.automaton.check()
    return found.automaton


def accepts(schema: Any, text: str) -> bool:
    return compiled(schema).accepts(text.encode())


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or []}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMAS: list[dict[str, Any]] = [
    STRING, INTEGER, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]},
    {"type": "string", "minLength": 2, "maxLength": 5}, {"type": "string", "maxLength": 0}, {"type": "string", "minLength": 1},
    {"type": "string", "pattern": "^[a-z\"\\\\]+$"}, {"type": "string", "pattern": "[^b]"},
    {"type": "string", "pattern": "^a|c$"},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")),
    {"type": "integer", "minimum": -12, "maximum": 134}, {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    {"type": "integer", "minimum": 0}, {"type": "integer", "maximum": -5}, {"type": "integer", "minimum": 2.5, "maximum": 1e4},
    {"enum": ["a", 3, None, {"k": [1, "é"]}, "\""]}, {"const": {"x": 1}}, {"type": "string", "enum": ["x", 3]},
    {"type": "array", "items": INTEGER}, {"type": "array", "items": STRING, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "null"}, "minItems": 3}, {"type": "array", "items": INTEGER, "maxItems": 0},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
    obj() | {"additionalProperties": False}, obj(a=STRING),
    obj(["a"], a=STRING, b=INTEGER), obj(["b"], a=STRING, b=INTEGER, c={"type": "null"}),
    obj(["a", "b"], a=obj(["x"], x=INTEGER), b={"type": "array", "items": obj(y=STRING), "maxItems": 2}),
    obj(["we\"ird é"], **{"we\"ird é": INTEGER}) | {"additionalProperties": False},
    {"type": "object", "additionalProperties": INTEGER}, {"properties": {"a": INTEGER}},
    {"anyOf": [INTEGER, STRING, obj(["k"], k={"const": "v"})]}, {"oneOf": [INTEGER, STRING]}, {"allOf": [INTEGER]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
    {"$defs": {"p": obj(["n"], n=INTEGER)}, "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 3},
    {"definitions": {"a/b": STRING}, "$ref": "#/definitions/a~1b", "title": "note"},
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_what_is_accepted_validates(index: int) -> None:
    schema, rng = SCHEMAS[index], random.Random(index)
    automaton = compiled(schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    found = [text for _ in range(60) if (text := walk_randomly(automaton, rng, 400)) is not None]
    assert found
    for text in found:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)


def test_what_models_write_is_accepted() -> None:
    schema = obj(["name"], name=STRING, age=INTEGER, tags={"type": "array", "items": STRING})
    for text in (
        '{"name": "Ann"}',
        '{"name":"Ann","age":3}',
        '{"name": "A\\"n\\u00e9 \\\\ ü \\n", "age": -12, "tags": []}',
        '{"name": "", "tags": ["a", "b","c"]}',
    ):
        assert accepts(schema, text), text
    for text in (
        '{"age": 3}',
        '{"age": 3, "name": "x"}',
        '{"name": "a\nb"}',
        '{"name": "A"} ',
        '{"name": "\\ud800"}',
        "{}",
    ):
        assert not accepts(schema, text), text
    assert accepts({"type": "number"}, "-0.5e+10") and not accepts({"type": "number"}, "01")
    assert not accepts(INTEGER, "1" * 17), "no endless numbers: Python itself would refuse to read them"


def test_optional_properties_and_their_commas() -> None:
    schema = obj(["b"], a=INTEGER, b=INTEGER, c=INTEGER)
    right = ['{"b":1}', '{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}']
    wrong = ["{}", '{"a":1}', '{,"b":1}', '{"a":1,"c":1}', '{"b":1,}', '{"a":1"b":1}', '{"b":1,"b":1}', '{"c":1,"b":1}']
    automaton = compiled(schema)
    assert all(automaton.accepts(text.encode()) for text in right)
    assert not any(automaton.accepts(text.encode()) for text in wrong)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (obj(a=STRING) | {"minProperties": 1}, "minProperties"),
        (STRING | {"contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "minimum": 3}, "minimum"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"not": STRING}, "not"),
        ({"if": STRING, "then": INTEGER}, "if"),
        (STRING | {"format": "iri"}, "iri"),
        (STRING | {"pattern": "a", "maxLength": 3}, "pattern"),
        ({"anyOf": [STRING], "minLength": 3}, "minLength"),
        ({"allOf": [STRING, STRING]}, "allOf"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/$defs/x", "$defs": {"x": STRING}, "maxLength": 3}, "maxLength"),
        (obj(["b"], a=STRING), "'b'"),
        (STRING | {"typo": 1}, "typo"),
        ({"maxLength": 3}, "type"),
        ({}, "any JSON"),
        ({"type": "object"}, "any JSON"),
        ({"type": "array"}, "any JSON"),
        ({"$ref": "#"}, "back to itself"),
        ({"$defs": {"n": obj(n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}, "back to itself"),
        ({"type": "string", "maxLength": 100_000}, "maxLength"),
        ({"type": "array", "items": {"type": "array", "items": STRING, "maxItems": 500}, "maxItems": 500}, "states"),
    ],
)
def test_what_no_table_holds_says_so(schema: Any, named: str) -> None:
    """These are left to the host's matcher, if it can."""
    found = outcome(schema)
    assert found.automaton is None and (found.host_grammar is None) == (found.refusal is not None)
    assert found.not_regular is not None and named in found.not_regular


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ('{"type":', "valid JSON"),
        ("[" * 60_000, "deep"),
        ('"text"', "must be an object"),
        ("false", "must be an object"),
        ({"type": "strin"}, "strin"),
        ({"type": []}, "type"),
        ({"enum": []}, "enum"),
        ({"type": "string", "enum": [3]}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"$ref": "#/nothing"}, "nothing"),
        ({"$ref": 3}, "$ref"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
        ({"type": "integer", "minimum": "x"}, "minimum"),
        ({"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 2}, "minItems"),
        ({"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2}, "minItems"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ('{"const": "\\ud800"}', "JSON text"),
    ],
)
def test_what_is_wrong_is_refused(schema: Any, named: str) -> None:
    found = outcome(schema)
    assert found.refusal is not None and named in found.refusal


def test_hostile_schemas_end_quickly() -> None:
    doubling: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/d{i + 1}"}] * 2} for i in range(40)}
    assert outcome({**doubling, "d40": STRING, "$ref": "#/d0"}).automaton is None
    deep: Any = INTEGER
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    assert "deep" in str(outcome(deep))
    assert compiled({"enum": list(range(5000))}).accepts(b"4999")
    assert outcome({"enum": ["x" * 40 + str(i) for i in range(3000)]}).automaton is None
