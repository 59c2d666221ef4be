"""Schemas whose keywords have values of the wrong kind: each is refused by its keyword, and none costs a process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.api.structured import compile as compiling
from headway.api.structured.compile import Outcome, Task, compile_task
from headway.api.structured.compiler import GrammarCompiler
from headway.api.structured.keywords import KNOWN
from headway.api.structured.shapes import SHAPES
from headway.core.errors import InvalidRequestError
from headway.core.params import StructuredOutputsParams
from tests.api.test_structured_regex import ALL_BYTES
from tests.examples import examples

UNFORESEEN = "cannot be read"


def outcome(schema: Any) -> Outcome:
    return compile_task(Task("json", schema if isinstance(schema, str) else json.dumps(schema), ALL_BYTES))


WRONG: list[Any] = [None, True, 5, -1, 1.5, 10**400, 1e308, "x", "(", "#", "#/$defs/a", [], [5], ["x"], [[]], [{}], [None], {},
                    {"a": 5}, {"a": {"enum": 5}}]  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(SHAPES))
def test_a_keyword_of_the_wrong_kind_is_refused_by_its_name(keyword: str) -> None:
    """Alone, joined with another, in a branch, behind a reference."""
    _, fits = SHAPES[keyword]
    for value in WRONG:
        if fits(value):
            continue
        bad = {keyword: value}
        for schema in (
            bad,
            {"type": "object", **bad} if keyword != "type" else bad,
            {"allOf": [bad, {keyword: [value]}]},
            {"allOf": [{"title": "x"}, bad]},
            {"oneOf": [bad, {"type": "string"}]},
            {"anyOf": [bad, {"type": "string"}], "title": "x"},
            {"$ref": "#/$defs/a", "$defs": {"a": bad}},
            {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": bad}},
        ):
            found = outcome(schema)
            assert found.refusal is not None and keyword in found.refusal, (schema, found)


NAMES = st.sampled_from(["a", "type", "enum"])
COMBINED = st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"])
VALUES = st.recursive(
    st.sampled_from(WRONG),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner),
)
KEYWORDS = sorted(KNOWN)
MALFORMED = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=3),
    lambda inner: (
        st.builds(
            lambda word, parts: {word: parts},
            COMBINED,
            st.lists(inner, max_size=2),
        )
        | st.builds(
            lambda value, required, more: {"type": "object", "properties": {"a": value}, "required": required, **more},
            inner,
            st.sampled_from([["a"], [], 5, [5], [[]]]),
            st.dictionaries(
                st.sampled_from(["additionalProperties", "patternProperties", "minProperties"]), inner, max_size=1
            ),
        )
        | st.builds(lambda inner: {"$ref": "#/$defs/a", "$defs": {"a": inner}, "type": "object"}, inner)
    ),
    max_leaves=4,
)


@examples(600)
@given(MALFORMED | VALUES)
def test_nothing_in_a_schema_is_unforeseen(schema: Any) -> None:
    found = outcome(schema)
    assert found.refusal is None or UNFORESEEN not in found.refusal, schema
    if found.refusal is None:
        assert (found.automaton is None) != (found.host_grammar is None)


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"], **more}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"oneOf": [tagged({"const": "x"}), tagged({"enum": 5})]}, "enum"),
        (
            {"oneOf": [tagged({"const": "x"}), {"$ref": "#/$defs/b"}], "$defs": {"b": tagged({}, required=5)}},
            "required",
        ),
        ({"oneOf": [tagged({"const": "x"}), {"$ref": "#/$defs/b"}], "$defs": {"b": 5}}, "a schema must be"),
        ({"type": "number", "minimum": 10**400}, "no number"),
        ({"type": "integer", "multipleOf": 10**400, "minimum": 1}, "no multiple"),
    ],
)
def test_what_is_wrong_in_a_branch_or_beyond_any_float_is_named(schema: Any, named: str) -> None:
    assert named in str(outcome(schema).refusal)


def test_bounds_beyond_any_float_are_bounds() -> None:
    found = outcome({"type": "integer", "minimum": 7, "maximum": 10**400})
    assert found.automaton is not None and found.automaton.accepts(b"8") and not found.automaton.accepts(b"6")


@pytest.mark.parametrize(
    "text",
    ['{"type": "number", "minimum": NaN}', '{"type": "number", "maximum": -Infinity}', '{"type": "integer", "multipleOf": NaN}',
     '{"const": NaN}', '{"enum": [Infinity]}', '{"const": {"\\udfff": 1}}', '{"\\ud800": 1}', '{"$ref": "#/\\ud800"}',
     '{"type": "\\ud800"}', '{"type": "string", "pattern": "\\ud800"}', '{"type": "object", "required": ["\\ud800"]}'],
)  # fmt: skip
def test_what_is_no_json_of_the_standard_is_refused(text: str) -> None:
    found = outcome(text)
    assert found.refusal is not None and UNFORESEEN not in found.refusal
    found.refusal.encode()


@pytest.mark.parametrize(
    "pattern", ["a{1" + "0" * 5000 + "}", "(?(1" + "0" * 5000 + ")a)", "(?P<\ud800>a)", r"\N{NO SUCH NAME}"]
)
def test_patterns_that_no_reader_foresees_are_refused(pattern: str) -> None:
    assert compile_task(Task("regex", pattern, ALL_BYTES)).refusal is not None


def test_whatever_goes_wrong_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours costs the request, and not the process and then another one."""

    def broken(_: Task) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(compiling, "_compile", broken)
    assert compile_task(Task("json", "{}", ALL_BYTES)).refusal == f"it {UNFORESEEN} (KeyError)"


@pytest.mark.parametrize("pattern", ["^" + "a" * 64_000 + "$"])
def test_a_long_pattern_takes_time_by_its_length(pattern: str) -> None:
    """By its square it would take all of its 10 seconds."""
    grammars = GrammarCompiler(frozenset(range(256)), seconds=3.0)
    try:
        with pytest.raises(InvalidRequestError, match="60000 states"):
            grammars.compile(StructuredOutputsParams(regex=pattern))
    finally:
        grammars.close()


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start: "a"~1000000', "Too many items"),
        ('start: (("a"{1000}){1000}){1000}', "Too many items"),
        ("start: start", "finite"),
        ("start: a\na: b\nb: a", "finite"),
    ],
)
def test_grammars_that_the_matcher_could_not_follow_are_refused_at_the_door(grammar: str, named: str) -> None:
    found = compile_task(Task("grammar", grammar, ALL_BYTES))
    assert found.refusal is not None and named in found.refusal and "verbose" not in found.refusal


def test_the_door_tries_grammars_that_end_early() -> None:
    for grammar in ('start: "a"', "start: /[a-z]{3}/", 'start: "\u00e9" start?', 'start: "a" | "b" "c"'):
        assert compile_task(Task("grammar", grammar, ALL_BYTES)).host_grammar is not None
