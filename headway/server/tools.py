"""Which tools a request offers, what it asks of them, and how the answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from headway.core.params import StructuredOutputsParams
from headway.server.errors import refuse
from headway.server.messages import tools_for_template
from headway.server.protocol import ChatRequest, NamedTool, Tool
from headway.server.tool_parsers import HermesParser, JsonParser, NamedParser, PlainParser, ToolParser

ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request uses tools.

    Attributes:
        shown: what the template sees; None: no tools.
        mode: "none", "auto", "required" or "named".
        name: the function asked for, in mode "named".
        structured: what the answer must look like, where a call is forced.
        single: at most one call.
    """

    shown: list[dict[str, Any]] | None = None
    mode: str = "none"
    name: str = ""
    structured: StructuredOutputsParams | None = None
    single: bool = False
    form: str = "none"

    def parser(self) -> ToolParser:
        """A new parser for one completion."""
        if self.mode == "named":
            return NamedParser(self.name)
        if self.mode == "required":
            return JsonParser(forced=True)
        if self.mode == "auto":
            return HermesParser() if self.form == "hermes" else JsonParser()
        return PlainParser()


def parser_form(setting: str, source: str | None) -> str:
    """The form in which the model writes calls: the setting, or what its template gives away; "none" if it does not."""
    if setting != "auto" or source is None:
        return "none" if setting == "auto" else setting
    if "<tool_call>" in source:
        return "hermes"
    if "<|python_tag|>" in source or '"parameters": dictionary of argument' in source:
        return "llama3_json"
    return "none"


def tool_plan(body: ChatRequest, form: str) -> ToolPlan:
    """Raises ApiError for what cannot be honoured.

    Args:
        form: of ``parser_form``.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice asks for a tool, but there are no tools", "tool_choice")
        return ToolPlan()
    shown = tools_for_template(body.tools)
    if choice == "none":
        return ToolPlan()
    single = body.parallel_tool_calls is False
    asked = body.structured_outputs is not None or (
        body.response_format is not None and body.response_format.type != "text"
    )
    if asked:
        raise refuse(
            "a form for the whole answer leaves no room for tool calls; use tool_choice: none", "response_format"
        )
    if isinstance(choice, NamedTool):
        tool = next((tool for tool in body.tools if tool.function.name == choice.function.name), None)
        if tool is None:
            raise refuse(f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice")
        schema = tool.function.parameters or dict(ANY_OBJECT)
        return ToolPlan(shown, "named", tool.function.name, StructuredOutputsParams(json=schema), True)
    if choice == "required":
        return ToolPlan(shown, "required", "", StructuredOutputsParams(json=calls_schema(body.tools, single)), single)
    if form == "none":
        raise refuse(
            "it is not known how this model writes tool calls: use tool_choice: required, "
            "or start the server with --tool-call-parser",
            "tools",
        )
    strict = [tool.function.name for tool in body.tools if tool.function.strict]
    if strict:
        raise refuse(
            f"strict (function {strict[0]!r}) holds only where a call is forced; use tool_choice: required, "
            "or leave strict out",
            "tools",
        )
    return ToolPlan(shown, "auto", single=single, form=form)


def calls_schema(tools: list[Tool], single: bool) -> dict[str, Any]:
    """A list of at least one call of any of the tools."""
    definitions: dict[str, Any] = {}
    kinds = []
    for number, tool in enumerate(tools):
        parameters = tool.function.parameters or dict(ANY_OBJECT)
        parameters = _hoisted(parameters, f"tool{number}_", definitions)
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    if single:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _hoisted(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with its definitions moved to ``definitions`` under ``prefix``: references are relative to the root."""
    rest = dict(schema)
    for keyword in ("$defs", "definitions"):
        found = rest.pop(keyword, None)
        if isinstance(found, dict):
            definitions |= {prefix + name: _renamed(value, prefix) for name, value in found.items()}
    moved = _renamed(rest, prefix)
    assert isinstance(moved, dict)
    return moved


def _renamed(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_renamed(item, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {name: _renamed(item, prefix) for name, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str):
        for head in ("#/$defs/", "#/definitions/"):
            if reference.startswith(head):
                renamed["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(head)}"
                return renamed
        raise refuse(f"tools: the reference {reference[:80]!r} does not point into $defs", "tools")
    return renamed
