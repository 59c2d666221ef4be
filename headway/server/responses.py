"""POST /v1/responses: OpenAI's newer form, text, images and calls of functions; nothing is stored."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.core.errors import HeadwayError
from headway.core.outputs import RequestOutput
from headway.core.params import StructuredOutputsParams
from headway.server.errors import ApiError, as_api_error, named, refuse
from headway.server.messages import input_messages
from headway.server.protocol import (
    Allowed,
    AllowedTools,
    Function,
    FunctionName,
    NamedTool,
    ResponsesAllowedTools,
    ResponsesNamedTool,
    ResponsesRequest,
    ResponsesTool,
    TextOptions,
    Tool,
    ToolName,
)
from headway.server.report import Usage, new_id
from headway.server.response_items import OutputItems
from headway.server.sampling import sampling_params, structured
from headway.server.service import Service, log_error, log_usage
from headway.server.sse import encode, respond
from headway.server.tools import ToolChoice, tool_form, tool_plan


async def responses(service: Service, request: Request) -> Response:
    """Answer one request; ApiError and InvalidRequestError go to the handlers of the app."""
    body = await service.body.read(request, ResponsesRequest)
    job = ResponseJob(service, body, request.scope)
    return await respond(request, job, body.stream, service.settings.request_timeout, last=b"")


def text_form(text: TextOptions | None) -> StructuredOutputsParams | None:
    """``text.format`` as what the answer must look like."""
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if (form.type == "json_schema") != (form.schema is not None):
        raise refuse("schema and type: json_schema go together", "text.format.schema")
    if form.schema is not None:
        return StructuredOutputsParams(json=form.schema)
    return StructuredOutputsParams(json_object=True)


def chat_tools(tools: list[ResponsesTool] | None) -> list[Tool]:
    """Tools in the form of chat completions."""
    made = []
    for tool in tools or []:
        named = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
        made.append(Tool(function=Function(**named)))
    return made


def chat_choice(choice: str | ResponsesNamedTool | ResponsesAllowedTools | None) -> ToolChoice:
    """``tool_choice`` in the form of chat completions."""
    if isinstance(choice, ResponsesNamedTool):
        return NamedTool(function=FunctionName(name=choice.name))
    if isinstance(choice, ResponsesAllowedTools):
        names = [ToolName(function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedTools(allowed_tools=Allowed(mode=choice.mode, tools=names))
    return choice


class ResponseJob:
    """One request, checked, and how its answer is written."""

    def __init__(self, service: Service, body: ResponsesRequest, scope: Scope) -> None:
        self._service = service
        self._body = body
        self._scope = scope
        self._model = service.check_common(body)
        service.check_stream(body)
        if body.background:
            raise refuse("background: answers are not kept; wait for this one, or stream it", "background")
        form = text_form(body.text)
        if form is not None and body.structured_outputs is not None:
            raise refuse("give either structured_outputs or text.format, not both", "structured_outputs")
        wanted = form or structured(body.structured_outputs, None)
        field = "structured_outputs" if form is None else "text.format"
        self._plan = tool_plan(
            chat_tools(body.tools),
            chat_choice(body.tool_choice),
            tool_form(service.settings.tool_call_parser, service.templates.tool_source),
            single=body.parallel_tool_calls is False,
            answer=wanted,
            answer_field=field,
        )
        if body.structured_outputs is not None and self._plan.mode in ("named", "required"):
            raise refuse("structured_outputs and a forced call are two forms; give one of them", "structured_outputs")
        self._names = {
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "multi_modal_data": "input",
        }
        self._names["structured_outputs"] = field if self._plan.structured is None else "tools"
        wanted = self._plan.structured or wanted
        with named(self._names):
            self._params = sampling_params(
                service.defaults, body, n=1, max_tokens=body.max_output_tokens, structured_outputs=wanted
            )
        messages, self._media = input_messages(body.instructions, body.input)
        service.check_media(self._media)
        self._messages = self._plan.messages(messages)
        self._usage = Usage()
        self._id, self._created = new_id("resp_"), int(time.time())

    async def _outputs(self, final: bool) -> AsyncIterator[RequestOutput]:
        with named(self._names):
            prompt = await self._service.conversation(
                self._messages,
                self._plan.for_template,
                self._media,
                extra=self._body.chat_template_kwargs,
                parse_special=bool(self._body.parse_special),
            )
            salt = self._body.cache_salt
            outputs = self._service.generate([prompt], self._params, salt=salt, special=False, final=final)
            async for _, output in outputs:
                self._usage.take(0, output)
                yield output

    def _items(self) -> OutputItems:
        return OutputItems(self._plan.parser(), self._plan.single)

    async def whole(self) -> Response:
        """The answer in one piece."""
        items, finish = self._items(), None
        with self._service.room(1, 1):
            async for output in self._outputs(final=True):
                finish = output.outputs[0].finish_reason
                for _ in (*items.take(output.outputs[0].text, True), *items.end(_status(finish))):
                    pass
        self._log(finish)
        return Response(encode(self._answer(_status(finish), items)), media_type="application/json")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Typed events with consecutive numbers; failures after the first are a ``response.failed`` event."""
        numbers = itertools.count()

        def event(kind: str, fields: dict[str, Any]) -> bytes:
            data = encode({"type": kind, "sequence_number": next(numbers), **fields})
            return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

        items, finish = self._items(), None
        begun = False
        try:
            with self._service.room(1, 1):
                async for output in self._outputs(final=False):
                    pieces = []
                    if not begun:
                        begun = True
                        about = self._answer("in_progress", None)
                        pieces = [event(f"response.{kind}", {"response": about}) for kind in ("created", "in_progress")]
                    for part in output.outputs:
                        finish = part.finish_reason or finish
                        told = items.take(part.text, part.finish_reason is not None)
                        pieces += [event(f"response.{kind}", fields) for kind, fields in told]
                    if pieces:
                        yield b"".join(pieces)
        except (HeadwayError, ApiError) as error:
            known = as_api_error(error)
            if not begun or known is None:
                raise
            log_error(self._scope, known.code)
            for _ in items.end("incomplete"):
                pass
            failed = self._answer("failed", items) | {"error": {"code": "server_error", "message": str(known)}}
            yield event("response.failed", {"response": failed})
            return
        status = _status(finish)
        last = [event(f"response.{kind}", fields) for kind, fields in items.end(status)]
        yield b"".join([*last, event(f"response.{status}", {"response": self._answer(status, items)})])
        self._log(finish)

    def _answer(self, status: str, items: OutputItems | None) -> dict[str, Any]:
        """The response object; without ``items`` as it is before there is any output."""
        body = self._body
        usage = None
        if items is not None:
            usage = {
                "input_tokens": self._usage.prompt_tokens,
                # Clients' types want the second; writing to the cache is free here.
                "input_tokens_details": {"cached_tokens": self._usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": self._usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._usage.prompt_tokens + self._usage.completion_tokens,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if items is None else items.done,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool) for tool in body.tools or []],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _log(self, finish: str | None) -> None:
        log_usage(self._scope, self._usage.prompt_tokens, self._usage.completion_tokens, finish)


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """A tool as clients' types want it back."""
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
            "strict": bool(tool.strict)}  # fmt: skip


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"
