"""POST /v1/responses: OpenAI's newer form, text only; nothing is stored."""

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
from headway.server.protocol import ResponsesRequest, TextOptions
from headway.server.report import Usage, new_id
from headway.server.sampling import sampling_params, structured
from headway.server.service import Service, log_usage
from headway.server.sse import encode, respond


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
        self._names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        if form is not None:
            self._names["structured_outputs"] = "text.format"
        wanted = form or structured(body.structured_outputs, None)
        with named(self._names):
            self._params = sampling_params(
                service.defaults, body, n=1, max_tokens=body.max_output_tokens, structured_outputs=wanted
            )
        self._messages = input_messages(body.instructions, body.input)
        self._usage = Usage()
        self._id, self._item, self._created = new_id("resp_"), new_id("msg_"), int(time.time())

    async def _outputs(self, final: bool) -> AsyncIterator[RequestOutput]:
        with named(self._names):
            prompt = await self._service.templates.render(self._messages, extra=self._body.chat_template_kwargs)
            salt = self._body.cache_salt
            outputs = self._service.generate([prompt], self._params, salt=salt, special=False, final=final)
            async for _, output in outputs:
                self._usage.take(0, output)
                yield output

    async def whole(self) -> Response:
        """The answer in one piece."""
        text, finish = "", None
        with self._service.room(1, 1):
            async for output in self._outputs(final=True):
                text, finish = output.outputs[0].text, output.outputs[0].finish_reason
        self._log(finish)
        return Response(encode(self._answer(_status(finish), text)), media_type="application/json")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Typed events with consecutive numbers; failures after the first are a ``response.failed`` event."""
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> bytes:
            data = encode({"type": kind, "sequence_number": next(numbers), **fields})
            return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        text, finish = "", None
        begun = False
        try:
            with self._service.room(1, 1):
                async for output in self._outputs(final=False):
                    pieces = []
                    if not begun:
                        begun = True
                        pieces = [
                            event("response.created", response=self._answer("in_progress", None)),
                            event("response.in_progress", response=self._answer("in_progress", None)),
                            event(
                                "response.output_item.added", output_index=0, item=self._message("in_progress", None)
                            ),
                            event("response.content_part.added", **place, part=_part("")),
                        ]
                    for part in output.outputs:
                        finish = part.finish_reason or finish
                        if part.text:
                            text += part.text
                            delta = event("response.output_text.delta", **place, delta=part.text, logprobs=[])
                            pieces.append(delta)
                    if pieces:
                        yield b"".join(pieces)
        except (HeadwayError, ApiError) as error:
            known = as_api_error(error)
            if not begun or known is None:
                raise
            failed = self._answer("failed", text) | {"error": {"code": "server_error", "message": str(known)}}
            yield event("response.failed", response=failed)
            return
        status = _status(finish)
        yield b"".join(
            (
                event("response.output_text.done", **place, text=text, logprobs=[]),
                event("response.content_part.done", **place, part=_part(text)),
                event("response.output_item.done", output_index=0, item=self._message(status, text)),
                event(f"response.{status}", response=self._answer(status, text)),
            )
        )
        self._log(finish)

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _answer(self, status: str, text: str | None) -> dict[str, Any]:
        body = self._body
        usage = None
        if text is not None:
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
            "output": [] if text is None else [self._message(status, text)],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _log(self, finish: str | None) -> None:
        log_usage(self._scope, self._usage.prompt_tokens, self._usage.completion_tokens, finish)


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
