"""Which tools a request offers, what it asks of them, and how the answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headway.core.params import StructuredOutputsParams
from headway.server.errors import refuse
from headway.server.messages import ASK_ARGUMENTS, ASK_CALLS, ASK_EITHER, ASK_FREELY, tools_for_template, with_tools
from headway.server.protocol import AllowedTools, NamedTool, Tool
from headway.server.tool_parsers import EitherParser, HermesParser, JsonParser, NamedParser, PlainParser, ToolParser

NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

ToolChoice = str | NamedTool | AllowedTools | None


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How the model meets tools.

    Attributes:
        calls: how it writes calls: "hermes", "llama3_json", or "none": it is not known.
        shown: its template shows tools; if not, the messages say what there is (``messages.with_tools``).
    """

    calls: str = "none"
    shown: bool = False


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request uses tools.

    Attributes:
        shown: what the model gets to see; None: no tools.
        mode: "none", "auto", "required", "named", or "either": calls, or an answer in the form that was asked for.
        name: the function asked for, in mode "named".
        structured: what the answer must look like, where calls are made by a grammar.
        single: at most one call.
        form: how the model meets tools.
        names: functions that may be called.
    """

    shown: list[dict[str, Any]] | None = None
    mode: str = "none"
    name: str = ""
    structured: StructuredOutputsParams | None = None
    single: bool = False
    form: ToolForm = field(default_factory=ToolForm)
    names: frozenset[str] = frozenset()

    def parser(self) -> ToolParser:
        """A new parser for one completion."""
        if self.mode == "named":
            return NamedParser(self.name)
        if self.mode == "required":
            return JsonParser(forced=True)
        if self.mode == "either":
            return EitherParser()
        if self.mode == "auto":
            return HermesParser(self.names) if self.form.calls == "hermes" else JsonParser(names=self.names)
        return PlainParser()

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the template is given."""
        return self.shown if self.form.shown else None

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the template is given it: one that shows no tools finds them in the messages."""
        if self.form.shown:
            return messages
        asks = {"named": ASK_ARGUMENTS % self.name, "required": ASK_CALLS, "either": ASK_EITHER}
        return with_tools(messages, self.shown, asks.get(self.mode, ASK_FREELY))


def tool_form(setting: str, source: str | None) -> ToolForm:
    """How the model meets tools, by the setting, or by what its template gives away.

    A model whose template knows no tools is told of them in the Hermes form, which is the most common one.
    """
    shown = source is not None and "tools" in source
    if setting != "auto" or source is None:
        return ToolForm("none" if setting == "auto" else setting, shown)
    if "<|python_tag|>" in source or '"parameters": dictionary of argument' in source:
        return ToolForm("llama3_json", shown)
    return ToolForm("hermes" if "<tool_call>" in source or not shown else "none", shown)


def tool_plan(
    tools: Sequence[Tool] | None,
    choice: ToolChoice,
    form: ToolForm,
    *,
    single: bool = False,
    answer: StructuredOutputsParams | None = None,
    answer_field: str = "response_format",
) -> ToolPlan:
    """What the request asks for. Raises ApiError for what cannot be honoured.

    Args:
        single: at most one call (``parallel_tool_calls: false``).
        answer: what a text answer must look like.
        answer_field: the field that says so.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice asks for a tool, but there are no tools", "tool_choice")
        return ToolPlan(form=form)
    shown = tools_for_template(tools)
    if choice == "none":
        return ToolPlan(form=form)
    if isinstance(choice, AllowedTools):
        tools, choice = allowed(tools, choice)
        shown = tools_for_template(tools)
    if isinstance(choice, NamedTool):
        [tool] = _chosen(tools, [choice.name_of()])
        made = StructuredOutputsParams(json=parameters_of(tool))
        return ToolPlan(shown, "named", tool.function.name, made, True, form)
    if choice == "required":
        made = StructuredOutputsParams(json=calls_schema(tools, single))
        return ToolPlan(shown, "required", "", made, single, form)
    if answer is not None:
        made = StructuredOutputsParams(json=either_schema(tools, single, answer, answer_field))
        return ToolPlan(shown, "either", "", made, single, form)
    if form.calls == "none":
        raise refuse(
            "it is not known how this model writes tool calls: use tool_choice: required, "
            "or start the server with --tool-call-parser",
            "tools",
        )
    strict = [tool.function.name for tool in tools if tool.function.strict]
    if strict:
        raise refuse(
            f"strict (function {strict[0]!r}) holds only where a grammar makes the call; use tool_choice: required, "
            "or leave strict out",
            "tools",
        )
    names = frozenset(tool.function.name for tool in tools)
    return ToolPlan(shown, "auto", single=single, form=form, names=names)


def allowed(tools: Sequence[Tool], choice: AllowedTools) -> tuple[list[Tool], str]:
    """The tools that may be called, and whether one must be."""
    names, mode = choice.names_of(), choice.mode_of()
    if not names:
        raise refuse("allowed_tools names no tool; use tool_choice: none", "tool_choice")
    return _chosen(tools, names), mode


def _chosen(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    known = {tool.function.name: tool for tool in tools}
    for name in names:
        if name not in known:
            raise refuse(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return [known[name] for name in dict.fromkeys(names)]


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments; one that names none takes none."""
    given = tool.function.parameters
    if not given or (given.get("properties") == {} and given.keys() <= {"type", "properties", "title", "description"}):
        return dict(NO_ARGUMENTS)
    return given


def calls_schema(tools: Sequence[Tool], single: bool) -> dict[str, Any]:
    """A list of at least one call of any of the tools."""
    definitions: dict[str, Any] = {}
    schema = _calls(tools, single, definitions)
    return schema | ({"$defs": definitions} if definitions else {})


def either_schema(
    tools: Sequence[Tool], single: bool, answer: StructuredOutputsParams, answer_field: str
) -> dict[str, Any]:
    """A list of calls, or an answer as it was asked for, which must be an object, so that the first character tells."""
    wanted = {"type": "object"} if answer.json_object else answer.json
    if not isinstance(wanted, dict) or wanted.get("type") != "object":
        raise refuse(
            'beside tools an answer can have the form of a JSON object only (a schema of "type": "object"); '
            "use tool_choice: none or required",
            answer_field,
        )
    definitions: dict[str, Any] = {}
    calls = _calls(tools, single, definitions)
    schema: dict[str, Any] = {"anyOf": [calls, _hoisted(wanted, "answer_", definitions)]}
    return schema | ({"$defs": definitions} if definitions else {})


def _calls(tools: Sequence[Tool], single: bool, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = []
    for number, tool in enumerate(tools):
        parameters = _hoisted(parameters_of(tool), f"tool{number}_", definitions)
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    return schema | ({"maxItems": 1} if single else {})


def _hoisted(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """``schema`` to be put into another one: references are relative to the root, so what they point to is moved to
    ``definitions``, under names that begin with ``prefix``.
    """
    if not _refers(schema):
        return {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
    root = prefix + "root"
    definitions[root] = _renamed(schema, f"#/$defs/{root}")
    return {"$ref": f"#/$defs/{root}"}


def _refers(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, dict) and (isinstance(value.get("$ref"), str) or any(map(_refers, value.values())))


def _renamed(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_renamed(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {name: _renamed(item, root) for name, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str):
        if reference != "#" and not reference.startswith("#/"):
            raise refuse(f"tools: the reference {reference[:80]!r} does not point into its own schema (#/...)", "tools")
        renamed["$ref"] = root + reference.removeprefix("#")
    return renamed
