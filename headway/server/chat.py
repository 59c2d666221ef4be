"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.core.outputs import CompletionOutput, RequestOutput
from headway.server.call_reader import Arguments, CallStart, Content, Piece
from headway.server.errors import named, refuse
from headway.server.messages import for_template, media_of
from headway.server.protocol import ChatRequest
from headway.server.report import Usage, chat_logprobs, new_id, prompt_logprobs
from headway.server.sampling import sampling_params, structured
from headway.server.service import Service, log_usage
from headway.server.sse import Chunks, encode, respond
from headway.server.tool_parsers import PlainParser, ToolParser
from headway.server.tools import tool_form, tool_plan

ROLE = b'"delta":{"role":"assistant","content":""}'


async def chat(service: Service, request: Request) -> Response:
    """Answer one request; ApiError and InvalidRequestError go to the handlers of the app."""
    body = await service.body.read(request, ChatRequest)
    job = ChatJob(service, body, request.scope)
    return await respond(request, job, body.stream, service.settings.request_timeout)


def max_tokens(body: ChatRequest) -> int | None:
    """The limit by its new or its old name; None: up to the context's end."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise refuse("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return old if new is None else new


class Turn:
    """The assistant's message of one choice, as its text comes in.

    Args:
        named: the one function to call was asked for by its name.
        single: at most one call is kept.

    Attributes:
        content: text so far.
        calls: tool calls so far.
    """

    def __init__(self, parser: ToolParser, named: bool, single: bool) -> None:
        self._parser = parser
        self._named = named
        self._single = single
        self._dropping = False
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.is_plain = isinstance(parser, PlainParser)

    def take(self, text: str, end: bool) -> Iterator[bytes]:
        """More text: the deltas it makes, as JSON."""
        for piece in self._parser.push(text) if text else ():
            yield from self._one(piece)
        if end:
            for piece in self._parser.finish():
                yield from self._one(piece)

    def _one(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Content):
            self.content += piece.text
            yield b'{"content":' + encode(piece.text) + b"}"
        elif isinstance(piece, CallStart):
            self._dropping = self._single and bool(self.calls)
            if not self._dropping:
                call = {"id": new_id("call_"), "type": "function", "function": {"name": piece.name, "arguments": ""}}
                yield encode({"tool_calls": [{"index": len(self.calls), **call}]})
                self.calls.append(call)
        elif not self._dropping:
            assert isinstance(piece, Arguments)
            self.calls[-1]["function"]["arguments"] += piece.text
            yield encode({"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": piece.text}}]})

    def finish_reason(self, reason: str | None) -> str | None:
        """ "tool_calls" where the model chose to call; a call asked for by name ends as text does, as at OpenAI's."""
        return "tool_calls" if reason == "stop" and self.calls and not self._named else reason

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message


class ChatJob:
    """One request, checked: its parameters and how its answer is written."""

    def __init__(self, service: Service, body: ChatRequest, scope: Scope) -> None:
        self._service = service
        self._body = body
        self._scope = scope
        self._model = service.check_common(body)
        service.check_stream(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
        answer = structured(body.structured_outputs, body.response_format)
        self._plan = tool_plan(
            body.tools,
            body.tool_choice,
            tool_form(service.settings.tool_call_parser, service.templates.tool_source),
            single=body.parallel_tool_calls is False,
            answer=answer,
            answer_field="response_format" if body.structured_outputs is None else "structured_outputs",
        )
        if body.structured_outputs is not None and self._plan.mode in ("named", "required"):
            raise refuse("structured_outputs and a forced call are two forms; give one of them", "structured_outputs")
        own: dict[str, Any] = {"max_tokens": max_tokens(body)}
        if body.logprobs:
            own["logprobs"] = body.top_logprobs or 0
        self._logprobs = bool(body.logprobs) or body.logprob_token_ids is not None
        own["structured_outputs"] = self._plan.structured or answer
        form = "tools" if self._plan.structured is not None else "response_format"
        self._names = {
            "prompt": "messages",
            "multi_modal_data": "messages",
            "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            "logprobs": "top_logprobs",
            "structured_outputs": form if body.structured_outputs is None else "structured_outputs",
        }
        with named(self._names):
            self._params = sampling_params(service.defaults, body, **own)
        self._media = media_of(body.messages)
        service.check_media(self._media)
        self._messages = self._plan.messages(for_template(body.messages))
        self._usage = Usage()
        self._id, self._created = new_id("chatcmpl-"), int(time.time())

    async def _outputs(self, final: bool) -> AsyncIterator[RequestOutput]:
        body = self._body
        open_end = bool(body.continue_final_message)
        prompt = await self._service.conversation(
            self._messages,
            self._plan.for_template,
            self._media,
            add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=open_end,
            extra=body.chat_template_kwargs,
            parse_special=bool(body.parse_special),
        )
        outputs = self._service.generate(
            [prompt],
            self._params,
            salt=body.cache_salt,
            special=bool(body.add_special_tokens),
            final=final,
        )
        with named(self._names):
            async for _, output in outputs:
                yield output

    def _turn(self) -> Turn:
        return Turn(self._plan.parser(), self._plan.mode == "named", self._plan.single)

    def _logprobs_of(self, part: CompletionOutput) -> dict[str, Any]:
        top = self._body.top_logprobs or 0
        content = chat_logprobs(self._service.need_tokenizer(), part.logprobs or [], top)
        return {"content": content, "refusal": None}

    async def whole(self) -> Response:
        """The answer in one piece."""
        choices = []
        rows = None
        with self._service.room(1, self._params.n):
            async for output in self._outputs(final=True):
                self._usage.take(0, output)
                rows = output.prompt_logprobs
                for part in output.outputs:
                    turn = self._turn()
                    for _ in turn.take(part.text, end=True):
                        pass
                    choice = {
                        "index": part.index,
                        "message": turn.message(),
                        "logprobs": self._logprobs_of(part) if self._logprobs else None,
                        "finish_reason": turn.finish_reason(part.finish_reason),
                        "stop_reason": part.stop_reason,
                    }
                    choices.append(choice)
        self._log(str(choices[0]["finish_reason"]))
        answer = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage.body(),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(rows)
        return Response(encode(answer), media_type="application/json")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks: the role first, then what comes, the finish reason, the usage if asked for."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        chunks = Chunks(self._id, "chat.completion.chunk", self._created, self._model, with_usage)
        turns = [self._turn() for _ in range(self._params.n)]
        finish: str | None = None
        begun = False
        with self._service.room(1, self._params.n):
            async for output in self._outputs(final=False):
                self._usage.take(0, output)
                counts = self._usage.body() if always else None
                pieces = []
                if not begun:
                    begun = True
                    pieces = [chunks.choice(i, ROLE, usage=counts) for i in range(len(turns))]
                for part in output.outputs:
                    turn = turns[part.index]
                    pieces += self._part(chunks, turn, part, counts)
                    finish = turn.finish_reason(part.finish_reason) or finish
                if pieces:
                    yield b"".join(pieces)
        if with_usage:
            yield chunks.usage(self._usage.body())
        self._log(finish)

    def _part(
        self, chunks: Chunks, turn: Turn, part: CompletionOutput, counts: dict[str, Any] | None
    ) -> Iterator[bytes]:
        """Chunks of one choice."""
        text, ended = part.text, part.finish_reason is not None
        if turn.is_plain:  # nearly all of the traffic: one delta, made without further ado
            deltas = [b'{"content":' + encode(text) + b"}"] if text else []
        else:
            deltas = list(turn.take(text, ended))
        logprobs = b"null"
        if self._logprobs and part.token_ids:
            # They go with the first delta of their tokens, or alone while the text is held back.
            logprobs = encode(self._logprobs_of(part))
            deltas = deltas or [b"{}"]
        for delta in deltas:
            yield chunks.choice(part.index, b'"delta":' + delta, logprobs=logprobs, usage=counts)
            logprobs = b"null"
        if ended:
            reason = turn.finish_reason(part.finish_reason)
            yield chunks.choice(part.index, b'"delta":{}', finish=reason, stop_reason=part.stop_reason, usage=counts)

    def _log(self, finish: str | None) -> None:
        log_usage(self._scope, self._usage.prompt_tokens, self._usage.completion_tokens, finish)
