"""Schemas as automata: every accepted text is JSON that validates, every keyword is honoured or refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headway.api.structured.compile import Outcome, Task, compile_task
from headway.api.structured.host_grammar import ByteVocabulary, from_schema
from headway.core.automaton import MATCHER_LIMITS, Automaton
from tests.api.test_structured_regex import ALL_BYTES, walk_randomly
from tests.examples import examples


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
    {"type": "number", "minimum": 3}, {"type": "number", "exclusiveMinimum": -0.25, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 10, "minimum": -35, "maximum": 99.5},
    obj(a=STRING, b=INTEGER, c=INTEGER) | {"minProperties": 1, "maxProperties": 2}, {"anyOf": [STRING], "minLength": 3},
    {"type": "object", "patternProperties": {"^x_[a-z]+$": INTEGER}, "additionalProperties": False},
    {"allOf": [obj(["a"], a={"type": "number"}), obj(["b"], b=STRING, a={"minimum": 2})]},
    {"$ref": "#/$defs/x", "$defs": {"x": STRING}, "maxLength": 3}, {"type": "string", "minimum": 7},
    {"oneOf": [obj(["k"], k={"const": "a"}, v=INTEGER), obj(["k"], k={"const": "b"})], "discriminator": {"propertyName": "k"}},
    obj(["k"], k={"enum": ["x"]}) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": INTEGER},
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


def walk_host(grammar: str, rng: random.Random, most: int) -> str | None:
    """A random text of a grammar of the host's, drawn byte by byte; None when it does not end in time."""
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), n_vocab=257)
    matcher, text = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**MATCHER_LIMITS)), bytearray()
    while len(text) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        may = np.flatnonzero(bits[:257]).tolist()
        assert may and not matcher.is_error(), f"stuck behind {bytes(text)!r}: {matcher.get_error()}"
        if may[-1] == 256 and (len(may) == 1 or rng.random() < 0.5):
            return text.decode()
        may = [byte for byte in may if byte < 256]
        closing = [byte for byte in may if byte in b'"}]']
        byte = rng.choice(closing) if closing and rng.random() < 0.5 else rng.choice(may)
        assert matcher.try_consume_tokens([byte]) == 1
        text.append(byte)
    return None


ATOMS = st.sampled_from(SCHEMAS[:26] + SCHEMAS[44:49])
NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"'])


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = st.one_of(st.none(), st.integers(0, 3))

    def made(properties: dict[str, Any], required: list[str], least: int | None, most: int | None, others: Any) -> Any:
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        if others is not None:
            schema["additionalProperties"] = others
        return schema | {k: v for k, v in (("minProperties", least), ("maxProperties", most)) if v is not None}

    def array(items: Any, prefix: list[Any], least: int | None, most: int | None) -> Any:
        schema: dict[str, Any] = {"type": "array", "items": items} | ({"prefixItems": prefix} if prefix else {})
        return schema | {k: v for k, v in (("minItems", least), ("maxItems", most)) if v is not None}

    objects = st.builds(
        made, st.dictionaries(NAMES, inner, max_size=3), st.lists(NAMES, max_size=2, unique=True), counts, counts,
        st.one_of(st.none(), st.booleans(), inner),
    )  # fmt: skip
    branches = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects, objects, st.builds(array, inner, st.lists(inner, max_size=2), counts, counts),
        st.builds(lambda b: {"anyOf": b}, branches), st.builds(lambda b: {"allOf": b}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda b: {"oneOf": b}, branches), st.builds(lambda o, b: {**o, "anyOf": b}, objects, branches),
        st.just({"$ref": "#"}), st.just(True), st.just({"type": "object"}),
        st.builds(lambda v: {"type": "object", "additionalProperties": v}, inner),
    )  # fmt: skip


@examples(120, suppress_health_check=list(HealthCheck))
@given(st.recursive(ATOMS, _grown, max_leaves=5), st.integers(0, 2**32))
def test_both_ways_keep_the_same_promises(schema: Any, seed: int) -> None:
    """Random schemas: what either way writes validates; what one writes, the other would."""
    rng, found = random.Random(seed), outcome(schema)
    if found.refusal is not None:
        return
    grammar = found.host_grammar or from_schema(schema)
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    texts = [text for _ in range(3) if (text := walk_host(grammar, rng, 250)) is not None]
    if found.automaton is not None:
        assert all(found.automaton.accepts(text.encode()) for text in texts)
        texts += [raw.decode() for _ in range(3) if (raw := walk_randomly(found.automaton, rng, 250)) is not None]
        tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), n_vocab=257)
        for text in texts:
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting(), (
                text
            )
    for text in texts:
        judge.validate(json.loads(text))
        assert not re.search(r"[0-9]{17}|\s\s|[:,]\s\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)), text


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
        (STRING | {"pattern": "a", "maxLength": 3}, "several demands"),
        (STRING | {"format": "email", "maxLength": 9}, "several demands"),
        (obj(["b"], a=STRING), "any JSON"),
        ({"maxLength": 3}, "any JSON"),
        ({}, "any JSON"),
        ({"type": "object"}, "any JSON"),
        ({"type": "array"}, "any JSON"),
        ({"type": "array", "items": {"$ref": "#"}}, "back to itself"),
        ({"$defs": {"n": obj(n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}, "back to itself"),
        ({"type": "array", "items": {"type": "array", "items": STRING, "maxItems": 500}, "maxItems": 500}, "states"),
        ({"type": "string", "maxLength": 10**6}, "states"),
        ({"type": "object", "properties": {f"property number {i}": STRING for i in range(800)}}, "states"),
        ({"enum": ["the quick brown fox jumps over a lazy dog " * 700, "y"]}, "transitions"),
        ({"enum": [f"value {i}" * 3 for i in range(1800)]}, "transitions"),
    ],
)
def test_what_no_table_holds_says_so(schema: Any, named: str) -> None:
    """These are left to the host's matcher."""
    found = outcome(schema)
    assert found.automaton is None and found.refusal is None and found.host_grammar is not None
    assert found.not_regular is not None and named in found.not_regular


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (STRING | {"contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
        ({"not": STRING}, "not"),
        ({"if": STRING, "then": INTEGER}, "if"),
        (STRING | {"typo": 1}, "typo"),
        (STRING | {"format": "iri"}, "iri"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [obj(["k"], k={"const": "a"}), obj(["k"], k={"enum": ["b", "a"]})]}, "oneOf"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"$ref": "#"}, "finite"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "nothing between"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                    "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]},
                },
            },
            "nothing between",
        ),
        ({"$defs": {"n": obj(["n"], n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}, "finite"),
        ({"allOf": [STRING, INTEGER]}, "both"),
        ({"allOf": [{"type": "array", "items": STRING}, {"type": "array", "prefixItems": [INTEGER]}]}, "both"),
        ({"allOf": [{"$ref": "#"}]}, "itself"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties"),
        ({"type": "object", "patternProperties": {"^a": INTEGER, "b": STRING}}, "patternProperties"),
        (obj(a=INTEGER) | {"patternProperties": {"a": STRING}}, "patternProperties"),
        (obj(["b"], a=INTEGER) | {"additionalProperties": False}, "'b'"),
        (obj(["a", "b"], a=INTEGER, b=INTEGER) | {"maxProperties": 1}, "maxProperties"),
        ({"const": "x" * 40_000}, "32000"),
        ({"type": "string", "minLength": 5000}, "minLength"),
        ('{"type":', "valid JSON"),
        ("[" * 60_000, "deep"),
        ('"text"', "must be an object"),
        ("false", "nothing"),
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
