"""Tool calls are found however the text is cut, and nothing of the text is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.server.call_reader import Arguments, CallStart, Content
from headway.server.protocol import Function, FunctionName, NamedTool, Tool
from headway.server.tool_parsers import EitherParser, HermesParser, JsonParser, NamedParser, ToolParser
from headway.server.tools import calls_schema, tool_form, tool_plan

CALL = '<tool_call>{"name": "f", "arguments": {"a": "}<tool_call>\\""}}</tool_call>'


@dataclass
class Call:
    """A call and all of its arguments."""

    name: str
    arguments: str


WANTED = Call("f", '{"a": "}<tool_call>\\""}')


def read(parser: ToolParser, pieces: list[str]) -> list[Content | Call]:
    """Pieces out, neighbouring contents joined, calls with their arguments."""
    found: list[Content | Call] = []
    for piece in [p for text in pieces for p in parser.push(text)] + list(parser.finish()):
        last = found[-1] if found else None
        if isinstance(piece, CallStart):
            found.append(Call(piece.name, ""))
        elif isinstance(piece, Arguments):
            assert isinstance(last, Call), "arguments follow their call"
            last.arguments += piece.text
        elif isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        else:
            found.append(piece)
    return found


@st.composite
def cut(draw: st.DrawFn, texts: list[str]) -> tuple[str, list[str]]:
    text = draw(st.sampled_from(texts))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


HERMES: dict[str, list[Content | Call]] = {
    "": [],
    "no calls <tool here": [Content("no calls <tool here")],
    "ends with < ": [Content("ends with < ")],
    CALL: [WANTED],
    f"  \n{CALL}\n\n{CALL}\n": [WANTED, WANTED],
    f"First {CALL} then": [Content("First"), WANTED, Content(" then")],
    CALL.removesuffix("</tool_call>"): [WANTED],
    "<tool_call>not json</tool_call>": [Content("<tool_call>not json</tool_call>")],
    '<tool_call>{"name": 1}</tool_call>x': [Content('<tool_call>{"name": 1}</tool_call>x')],
    "<tool_call>{": [Content("<tool_call>{")],
    'so  <tool_call>{"name": "f", "arg': [Content('so  <tool_call>{"name": "f", "arg')],
    "x <tool_call>no call<tool_call>" + CALL: [Content("x <tool_call>no call<tool_call>"), WANTED],
    '<tool_call>{"arguments": {"a": [1, {}]}, "id": "7", "name": "f"}</tool_call>': [Call("f", '{"a": [1, {}]}')],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': [Call("f", '{"a": 1}')],
    '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>': [
        Content('<tool_call>{"name": "f", "arguments": "no object"}</tool_call>')
    ],
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>': [
        Content('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')
    ],
    '<tool_call>{"name": "f"}</tool_call>': [Call("f", "{}")],
    '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>': [Call("f", '{"a": "</tool_call>"}')],
    '<tool_call>{"name": "f", "arguments": {"a": 1': [Call("f", '{"a": 1')],
    '<tool_call>{"name": "f", "arguments": {}, "name": "g", "arguments": {"a": 1}}</tool': [Call("f", "{}")],
    '<tool_call>{"arguments": {}, "name": "f", "name": "g"} and': [Call("f", "{}"), Content(" and")],
}
LLAMA: dict[str, list[Content | Call]] = {
    "": [],
    "plain [1] text": [Content("plain [1] text")],
    '{"name": "f", "parameters": {"a": 1}}': [Call("f", '{"a": 1}')],
    '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}': [
        Call("f", "{}"),
        Call("g", "{}"),
    ],
    '[{"name": "f", "arguments": "{}"}]': [Call("f", "{}")],
    '{"not": "a call"} and more': [Content('{"not": "a call"} and more')],
    '{"name": "f", "parameters": {}} and more': [Call("f", "{}"), Content(" and more")],
    '{"name": "f", "para': [Content('{"name": "f", "para')],
    "<|python_tag|": [Content("<|python_tag|")],
}


@given(cut(list(HERMES)))
def test_hermes(case: tuple[str, list[str]]) -> None:
    assert read(HermesParser(), case[1]) == HERMES[case[0]]


@given(cut(list(LLAMA)))
def test_llama(case: tuple[str, list[str]]) -> None:
    assert read(JsonParser(), case[1]) == LLAMA[case[0]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evenly_cut(size: int) -> None:
    for make, cases in ((HermesParser, HERMES), (JsonParser, LLAMA)):
        for text, wanted in cases.items():
            assert read(make(), [text[i : i + size] for i in range(0, len(text), size)]) == wanted, text


@given(st.lists(st.text(alphabet='<tool_call>{}"/ \n[],;|nameprt:1', max_size=12), max_size=12))
@pytest.mark.parametrize("make", [HermesParser, JsonParser])
def test_no_text_breaks_a_parser_or_is_lost(make: Callable[[], ToolParser], pieces: list[str]) -> None:
    found = read(make(), pieces)
    if not any(isinstance(piece, Call) for piece in found):  # white space around calls goes
        shown = "".join(piece.text for piece in found if isinstance(piece, Content))
        assert shown == "".join(pieces).removeprefix("<|python_tag|>") or shown == "".join(pieces)


def test_content_is_not_held_back() -> None:
    parser = HermesParser()
    assert list(parser.push("Hello wor")) == [Content("Hello wor")]
    assert list(parser.push("ld <")) == [Content("ld")], "a space and a bracket may begin a call"
    assert list(parser.push("b>")) == [Content(" <b>")]


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (HermesParser, '<tool_call>{"name": "f", "arguments": '),
        (lambda: JsonParser(True), '[{"name":"f","parameters":'),
    ],
)
def test_arguments_are_not_held_back(make: Callable[[], ToolParser], head: str) -> None:
    parser = make()
    assert list(parser.push(head)) == []
    assert list(parser.push('{"ci')) == [CallStart("f"), Arguments('{"ci')]
    assert list(parser.push('ty": "Ro')) == [Arguments('ty": "Ro')]
    assert list(parser.push('me"}')) == [Arguments('me"}')]
    assert list(parser.push("}")) == []


def test_a_named_call_begins_with_its_name() -> None:
    parser = NamedParser("f")
    assert list(parser.push("{")) == [CallStart("f"), Arguments("{")]
    assert list(parser.push("}")) == [Arguments("}")]


def test_forced_calls_may_be_cut_off() -> None:
    text = '[{"name":"f","parameters":{}},{"name":"g","par'
    assert read(JsonParser(forced=True), [text]) == [Call("f", "{}"), Content('{"name":"g","par')]


def test_the_schema_of_forced_calls() -> None:
    point = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    other = {"type": "object", "properties": {"p": {"$ref": "#/definitions/P"}}, "definitions": {"P": {"type": "null"}}}
    tools = [Tool(function=Function(name=n, parameters=p)) for n, p in (("a", point), ("b", other), ("c", None))]
    schema = calls_schema(tools, single=True)
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(schema).is_valid
    assert check([{"name": "a", "parameters": {"p": 1}}])
    assert check([{"name": "b", "parameters": {"p": None}}])
    assert not check([{"name": "a", "parameters": {"p": None}}]), "each tool keeps its own definitions"
    assert not check([]) and not check([{"name": "d", "parameters": {}}])
    assert not check([{"name": "c", "parameters": {}}] * 2), "one call only"
    assert json.dumps(point).count("$defs") == 2, "the client's schema is not changed"


@pytest.mark.parametrize(
    ("setting", "source", "form"),
    [
        ("auto", "... <tool_call> ...", "hermes"),
        ("auto", "... <|python_tag|> ...", "llama3_json"),
        ("auto", "{{ tools }} in a form of its own", "none"),
        ("auto", "plain", "hermes"),
        ("auto", None, "none"),
        ("hermes", "plain", "hermes"),
        ("none", "<tool_call>", "none"),
    ],
)
def test_the_form_is_found_out_from_the_template(setting: str, source: str | None, form: str) -> None:
    assert tool_form(setting, source).calls == form


def test_references_to_the_root_and_to_properties_stay_within_their_tool() -> None:
    follow = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    tree = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": follow},
        "required": ["value", "next"],
    }
    other = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}},
        "required": ["b"],
    }
    tools = [Tool(function=Function(name=n, parameters=p)) for n, p in (("tree", tree), ("other", other))]
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(calls_schema(tools, single=False)).is_valid
    assert check([{"name": "tree", "parameters": {"value": 1, "next": {"value": 2, "next": None}}}])
    assert not check([{"name": "tree", "parameters": {"value": 1, "next": {"value": "x", "next": None}}}])
    assert check([{"name": "other", "parameters": {"b": True}}]) and not check(
        [{"name": "other", "parameters": {"b": 1}}]
    )


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_takes_none(parameters: Any) -> None:
    tool = Tool(function=Function(name="now", parameters=parameters))
    choice = NamedTool(function=FunctionName(name="now"))
    plan = tool_plan([tool], choice, tool_form("auto", None))
    assert plan.structured is not None
    assert plan.structured.json == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('[{"name":"f","parameters":{"a":1}}]', [Call("f", '{"a":1}')]),
        ('{"name":"f","parameters":{"a":1}}', [Content('{"name":"f","parameters":{"a":1}}')]),
    ],
)
def test_calls_or_an_answer(text: str, pieces: list[Any]) -> None:
    assert read(EitherParser(), [text]) == pieces
    assert read(EitherParser(), list(text)) == pieces


@pytest.mark.parametrize("make", [lambda: HermesParser(frozenset("f")), lambda: JsonParser(names=frozenset("f"))])
def test_calls_of_other_functions_are_content(make: Callable[[], ToolParser]) -> None:
    head = "<tool_call>" if isinstance(make(), HermesParser) else ""
    text = head + '{"name": "g", "arguments": {}}'
    assert read(make(), list(text)) == [Content(text)]
    assert read(make(), list(text.replace("g", "f"))) == [Call("f", "{}")]
