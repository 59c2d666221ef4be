"""OpenAI's messages as chat templates read them: plain dictionaries, text contents, arguments of calls as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headway.server.errors import refuse
from headway.server.protocol import ChatMessage, InputItem, TextPart, Tool, ToolCall

MAX_TOOLS: Final = 128


def text_of(content: str | list[TextPart] | None, where: str) -> str | None:
    """Parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise refuse(f"{where}[{i}] has no text", where)
        texts.append(text)
    return "\n".join(texts)


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """What the template sees. Raises ApiError with the message's number."""
    return [_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _one(message: ChatMessage, where: str) -> dict[str, Any]:
    content = text_of(message.content, f"{where}.content")
    if content is None and not (message.role == "assistant" and message.tool_calls):
        content = message.refusal
        if content is None:
            raise refuse(f"{where}.content is missing", f"{where}.content")
    if message.tool_calls and message.role != "assistant":
        raise refuse(f"{where}: only the assistant makes tool calls", f"{where}.tool_calls")
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        # Many templates join strings: a missing content is shown as none.
        "content": content or "",
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return shown


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise refuse(f"{where}.function.arguments must be a JSON object, as text", where) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def input_messages(instructions: str | None, items: str | list[InputItem]) -> list[dict[str, Any]]:
    """The input of /v1/responses as messages."""
    head = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*head, {"role": "user", "content": items}]
    if not items:
        raise refuse("input is empty; give at least one message", "input")
    messages = []
    for i, item in enumerate(items):
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": text_of(item.content, f"input[{i}].content") or ""})
    return [*head, *messages]


def tools_for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as dictionaries, as clients send them."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise refuse(f"at most {MAX_TOOLS} tools may be given, got {len(tools)}", "tools")
    if len({tool.function.name for tool in tools}) < len(tools):
        raise refuse("two tools have the same name", "tools")
    shown = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        shown.append({"type": "function", "function": function})
    return shown
