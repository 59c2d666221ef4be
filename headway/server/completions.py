"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.api.prompts import Prompt
from headway.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from headway.server.errors import named, refuse
from headway.server.fields import REFUSED
from headway.server.protocol import CompletionRequest
from headway.server.report import CompletionLogprobs, Usage, new_id, prompt_logprobs
from headway.server.sampling import sampling_params, structured
from headway.server.service import NO_STREAM, Service, log_usage
from headway.server.sse import Chunks, encode, respond


async def completions(service: Service, request: Request) -> Response:
    """Answer one request; ApiError and InvalidRequestError go to the handlers of the app."""
    body = await service.body.read(request, CompletionRequest)
    job = CompletionJob(service, body, request.scope)
    if body.stream and body.echo and body.logprobs is not None:
        raise refuse(NO_STREAM, "prompt_logprobs")
    return await respond(request, job, body.stream, service.settings.request_timeout)


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """The prompts of all forms: text, texts, token ids, lists of token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise refuse("prompt is an empty list; give at least one prompt", "prompt")
    if isinstance(given[0], int):
        if not all(isinstance(item, int) for item in given):
            raise refuse("prompt mixes token ids with whole prompts", "prompt")
        return [given]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given):
        raise refuse("prompt mixes token ids with whole prompts", "prompt")
    return given  # type: ignore[return-value]


class CompletionJob:
    """One request, checked: its prompts, its parameters, and how its answer is written."""

    def __init__(self, service: Service, body: CompletionRequest, scope: Scope) -> None:
        self._service = service
        self._body = body
        self._scope = scope
        self._model = service.check_common(body)
        service.check_stream(body)
        self._prompts = prompts_of(body)
        if body.parse_special is False and service.tokenizer is not None:
            texts = service.tokenizer.control_texts
            self._prompts = [texts.as_text(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts]
        self._echo = bool(body.echo)
        self._empty = body.max_tokens == 0
        if self._empty and not self._echo:
            raise refuse("max_tokens: 0 makes sense with echo only", "max_tokens")
        if body.best_of not in (None, body.n or 1):
            raise refuse(f"best_of: {REFUSED['best_of']}", "best_of", "unsupported_parameter")
        if body.max_tokens is not None:
            own: dict[str, Any] = {"max_tokens": 1 if self._empty else body.max_tokens}
        else:
            own = {"max_tokens": max(service.defaults.max_tokens or 16, body.min_tokens or 0)}
        if body.logprobs is not None:
            own["logprobs"] = body.logprobs
            if self._echo and body.prompt_logprobs is None:
                own["prompt_logprobs"] = body.logprobs
        self._logprobs = body.logprobs is not None or body.logprob_token_ids is not None
        if self._logprobs or self._echo:
            service.need_tokenizer()
        own["structured_outputs"] = structured(body.structured_outputs, body.response_format)
        self._names = {} if body.structured_outputs is not None else {"structured_outputs": "response_format"}
        self._params = sampling_params(service.defaults, body, **own)
        self._usage = Usage()
        self._id, self._created = new_id("cmpl-"), int(time.time())

    async def _outputs(self, final: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
        special = self._body.add_special_tokens is not False
        outputs = self._service.generate(
            self._prompts, self._params, salt=self._body.cache_salt, special=special, final=final
        )
        with named(self._names):
            async for each in outputs:
                yield each

    def _taken(self, number: int, output: RequestOutput) -> None:
        """Count it; with max_tokens 0 the one token the engine had to make is left out."""
        if self._empty:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []
                completion.logprobs = None if completion.logprobs is None else []
                if completion.finish_reason is not None:
                    completion.finish_reason, completion.stop_reason = "length", None
        self._usage.take(number, output)

    def _echoed(self, output: RequestOutput) -> str:
        if not self._echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        return self._service.need_tokenizer().decode(output.prompt_token_ids, self._params.skip_special_tokens)

    def _rows(self, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """Log-probabilities of one whole choice, the echoed prompt's first."""
        ids, rows = part.token_ids, list[TokenLogprobs | None](part.logprobs or [])
        if self._echo:
            ids, rows = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or []), *rows]
        return CompletionLogprobs(self._service.need_tokenizer()).body(ids, rows)

    async def whole(self) -> Response:
        """The answer in one piece."""
        choices: dict[int, dict[str, Any]] = {}
        n, asked = self._params.n, self._body.prompt_logprobs is not None
        with self._service.room(len(self._prompts), n):
            async for number, output in self._outputs(final=True):
                self._taken(number, output)
                for part in output.outputs:
                    choice: dict[str, Any] = {
                        "index": number * n + part.index,
                        "text": self._echoed(output) + part.text,
                        "logprobs": None,
                        "finish_reason": part.finish_reason,
                        "stop_reason": part.stop_reason,
                    }
                    if self._logprobs:
                        choice["logprobs"] = self._rows(output, part)
                    if asked:
                        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                    choices[choice["index"]] = choice
        listed = [choices[index] for index in sorted(choices)]
        self._log(listed[0]["finish_reason"])
        answer = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        return Response(
            encode({**answer, "choices": listed, "usage": self._usage.body()}), media_type="application/json"
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        chunks = Chunks(self._id, "text_completion", self._created, self._model, with_usage)
        writers: dict[int, CompletionLogprobs] = {}
        seen: set[int] = set()
        finish = None
        n = self._params.n
        with self._service.room(len(self._prompts), n):
            async for number, output in self._outputs(final=False):
                self._taken(number, output)
                pieces = []
                for part in output.outputs:
                    index = number * n + part.index
                    first = index not in seen
                    seen.add(index)
                    text = self._echoed(output) + part.text if first else part.text
                    logprobs = b"null"
                    if self._logprobs and part.token_ids:
                        writer = writers.setdefault(index, CompletionLogprobs(self._service.need_tokenizer()))
                        logprobs = encode(writer.body(part.token_ids, part.logprobs or []))
                    elif not text and part.finish_reason is None:
                        continue
                    finish = part.finish_reason or finish
                    pieces.append(
                        chunks.choice(
                            index,
                            b'"text":' + encode(text),
                            logprobs=logprobs,
                            finish=part.finish_reason,
                            stop_reason=part.stop_reason,
                            usage=self._usage.body() if always else None,
                        )
                    )
                if pieces:
                    yield b"".join(pieces)
        if with_usage:
            yield chunks.usage(self._usage.body())
        self._log(finish)

    def _log(self, finish: str | None) -> None:
        log_usage(self._scope, self._usage.prompt_tokens, self._usage.completion_tokens, finish)
