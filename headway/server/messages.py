"""OpenAI's messages as chat templates read them: plain dictionaries, text contents, arguments of calls as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headway.server.errors import refuse
from headway.server.protocol import (
    ChatMessage,
    FunctionCall,
    ImageUrl,
    InputItem,
    InputPart,
    TextPart,
    Tool,
    ToolCall,
)

MAX_TOOLS: Final = 128


NO_SOUND: Final = (
    "input_audio: the model takes no audio in a conversation; send recordings to /v1/audio/transcriptions of a model that "
    "hears, and the text here"
)
NOT_READ: Final = {
    "audio_url": "audio_url: recordings are not fetched; send input_audio to a model that hears, or the recording to "
    "/v1/audio/transcriptions of one",
    "video_url": "video_url: videos are not read; send frames of it as images",
    "input_file": "input_file: files are not read; send their text as input_text, and pictures as input_image",
}
"""Types of parts that are refused, and what to do instead."""


def text_of(content: str | list[TextPart] | None, where: str) -> str | None:
    """Parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.is_medium:
            raise refuse(f"{where}[{i}]: images and recordings belong in messages of users", where)
        if part.type in NOT_READ:
            raise refuse(f"{where}[{i}]: {NOT_READ[part.type]}", where)
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise refuse(f"{where}[{i}] has no text", where)
        texts.append(text)
    return "\n".join(texts)


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """What the template sees. Raises ApiError with the message's number."""
    return [_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


class Addressed(NamedTuple):
    """An image that a message names, or a recording that it brings: the address, or the file in base64; and the field."""

    url: str
    where: str
    is_sound: bool = False


def media_of(messages: Sequence[ChatMessage]) -> list[Addressed]:
    """All images and recordings, in order. Raises ApiError: a part of that type has none, or is of a type that is not read."""
    return [medium for i, message in enumerate(messages) for medium in _media_in(message, f"messages[{i}]")]


def _media_in(message: ChatMessage, field: str) -> list[Addressed]:
    found = []
    for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
        where = f"{field}.content[{j}]"
        if part.type in NOT_READ:
            raise refuse(f"{where}: {NOT_READ[part.type]}", where)
        for kind, given in (("image_url", part.image_url), ("input_audio", part.input_audio)):
            if (part.type == kind) != (given is not None) or (given is not None and part.text is not None):
                raise refuse(f"{where}: a part of type {kind} has {kind}, and no other has it", where)
        if part.is_medium and message.role not in ("user", "system", "developer"):
            raise refuse(
                f"{where}: images and recordings come from users; a message of role {message.role} has none", where
            )
        if part.image_url is not None:
            found.append(Addressed(part.image_url.url, where))
        elif part.input_audio is not None:
            found.append(Addressed(part.input_audio.data, where, is_sound=True))
    return found


def _parts(content: str | list[TextPart] | None, where: str) -> str | list[dict[str, Any]] | None:
    """Text; or where there are images or recordings, the parts as templates show them."""
    if isinstance(content, str) or content is None or not any(part.is_medium for part in content):
        return text_of(content, where)
    return [
        {"type": _SHOWN[part.type]} if part.is_medium else {"type": "text", "text": part.text or ""} for part in content
    ]


_SHOWN: Final = {"image_url": "image", "input_audio": "audio"}


def _one(message: ChatMessage, where: str) -> dict[str, Any]:
    content = _parts(message.content, f"{where}.content")
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


def _chat_parts(content: str | list[InputPart] | None, where: str) -> str | list[TextPart] | None:
    """Parts of /v1/responses as those of chat completions. Raises ApiError: one of another type than its fields say."""
    if content is None or isinstance(content, str):
        return content
    found = []
    for i, part in enumerate(content):
        if part.type in NOT_READ:
            raise refuse(f"{where}[{i}]: {NOT_READ[part.type]}", where)
        is_image, is_sound = part.type == "input_image", part.type == "input_audio"
        if part.file_id is not None:
            raise refuse(
                f"{where}[{i}].file_id: no files are kept here; give image_url, which may be a data URL", where
            )
        if is_image != (part.image_url is not None) or (is_image and part.text is not None):
            raise refuse(f"{where}[{i}]: a part of type input_image has image_url, and no other has it", where)
        if is_sound != (part.input_audio is not None) or (is_sound and part.text is not None):
            raise refuse(f"{where}[{i}]: a part of type input_audio has input_audio, and no other has it", where)
        if part.input_audio is not None:
            found.append(TextPart(type="input_audio", input_audio=part.input_audio))
        elif part.image_url is None:
            kind: Literal["refusal", "text"] = "refusal" if part.type == "refusal" else "text"
            found.append(TextPart(type=kind, text=part.text, refusal=part.refusal))
        else:
            found.append(TextPart(type="image_url", image_url=ImageUrl(url=part.image_url)))
    return found


class Conversation(NamedTuple):
    """The input of /v1/responses: messages as templates read them, and the images and recordings in them, in order."""

    messages: list[dict[str, Any]]
    media: list[Addressed]


def input_messages(instructions: str | None, items: str | list[InputItem]) -> Conversation:
    """The input of /v1/responses: calls in a row are one message of the assistant."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    media: list[Addressed] = []
    if isinstance(items, str):
        return Conversation([*messages, {"role": "user", "content": items}], media)
    if not items:
        raise refuse("input is empty; give at least one message", "input")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        _check_item(item, where)
        if item.type == "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
            call = _call(ToolCall(id=item.call_id or "", function=function), where)
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type == "function_call_output":
            text = text_of(_chat_parts(item.output, f"{where}.output"), f"{where}.output") or ""
            messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
        else:
            assert item.role is not None, "_check_item has seen one"
            message = ChatMessage(role=item.role, content=_chat_parts(item.content, f"{where}.content"))
            media += _media_in(message, where)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _parts(message.content, f"{where}.content") or ""})
    return Conversation(messages, media)


ITEM_FIELDS: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def _check_item(item: InputItem, where: str) -> None:
    own = ITEM_FIELDS[item.type]
    for name in {name for fields in ITEM_FIELDS.values() for name in fields}:
        given = getattr(item, name) is not None
        if given and name not in own:
            raise refuse(f"{where}.{name}: an item of type {item.type} has no such field", f"{where}.{name}")
        if not given and name in own:
            raise refuse(f"{where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")


def with_tools(messages: list[dict[str, Any]], shown: list[dict[str, Any]] | None, ask: str) -> list[dict[str, Any]]:
    """For templates that know no tools: the same conversation, with tools, calls and what came of them as text.

    The tools stand before the first message, whoever wrote it: not all templates take a system message.

    Args:
        shown: of ``tools_for_template``; None: no tools now, but earlier turns may have calls.
        ask: how to answer, behind the list of tools.
    """
    has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
    if (shown or has_calls) and any(isinstance(message.get("content"), list) for message in messages):
        raise refuse(
            "the model's chat template shows no tools; send images and recordings without tools and calls", "tools"
        )
    told = []
    for message in messages:
        rest = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            calls = [TOOL_CALL % _json(call["function"]) for call in message["tool_calls"]]
            rest["content"] = "\n".join([*([rest["content"]] if rest["content"] else []), *calls])
        elif message["role"] == "tool":
            rest = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        told.append(rest)
    if shown and told:
        listed = "\n".join(_json(tool["function"]) for tool in shown)
        told[0] = {**told[0], "content": f"You can call these functions:\n{listed}\n{ask}\n\n{told[0]['content']}"}
    return told


TOOL_CALL: Final = "<tool_call>\n%s\n</tool_call>"
ASK_FREELY: Final = (
    "To call one, answer with\n" + TOOL_CALL % '{"name": "the function", "arguments": {"its": "arguments"}}'
)
ASK_CALLS: Final = 'Answer with a list of calls: [{"name": "the function", "parameters": {"its": "arguments"}}]'
ASK_ARGUMENTS: Final = "Answer with the arguments of a call of %s, as a JSON object."
ASK_EITHER: Final = ASK_CALLS + ", or with a JSON object that answers the question."


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


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
