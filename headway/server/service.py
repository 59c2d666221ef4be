"""What all routes share: the engine, the limits, and how a request runs until its end, its client's or its time's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from starlette.types import Receive, Scope

from headway.api.frontend import picture_prompt
from headway.api.inputs import check_logprobs
from headway.api.pictures.content import read_base64, read_data_url, shown
from headway.api.pictures.sounds import MAX_SOUND_BYTES, Sound, read_sound
from headway.api.prompts import Prompt, TextPrompt
from headway.core.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from headway.core.outputs import RequestOutput
from headway.core.params import SamplingParams
from headway.server.connection import WHEN_GONE
from headway.server.decode import Body
from headway.server.door import LOG_FIELDS
from headway.server.errors import ApiError, refuse, shutting_down
from headway.server.hearing.hearing import Hearing
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.media_fetch import check_url, fetch
from headway.server.messages import NO_SOUND, Addressed
from headway.server.metrics_source import shown_name
from headway.server.protocol import PromptSampling, ResponsesRequest, Sampling
from headway.server.settings import ServerSettings
from headway.server.templates import Templates
from headway.server.throughput import ThroughputLog

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM
    from headway.api.tokenizer import Tokenizer

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
GONE: Final = "client_gone"
SHORT_WORK: Final = 8
"""Texts to a model that pools wait in place of one completion: each takes a part of one step."""
NO_LIMIT: Final = contextlib.nullcontext()
NO_STREAM: Final = "log-probabilities of the prompt need stream: false"


class ClientGoneError(Exception):
    """Nobody is there any more to be answered."""


class Service:
    """One engine behind one HTTP interface.

    Attributes:
        names: model names clients may use; the first one is shown.
        created: Unix time at which the model was loaded.
        pools: the model pools: it generates nothing.
        hearing: of a model that hears; None: it does not.
        throughput: is told when there is work; None: no such lines.
    """

    throughput: ThroughputLog | None = None

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, lifecycle: Lifecycle) -> None:
        self.llm = llm
        self.settings = settings
        self.lifecycle = lifecycle
        self.info = llm.model_info
        self.names = settings.served_model_name or [shown_name(self.info.model)]
        self.created = int(time.time())
        self.body = Body(settings.max_body_bytes, settings.max_json_depth, settings.max_bodies_bytes)
        self.defaults = llm.get_default_sampling_params()
        self.tokenizer = _tokenizer(llm)
        override = None if settings.chat_template is None else Path(settings.chat_template).read_text(encoding="utf-8")
        self.templates = Templates(self.tokenizer, override, settings.template_timeout)
        self.pools = self.info.tasks[0].pools
        hears = self.info.hearing is not None and self.tokenizer is not None
        self.hearing = Hearing(self.info, self.tokenizer, settings) if hears else None
        lifecycle.capacity = self.info.max_num_seqs + settings.max_queue * (SHORT_WORK if self.pools else 1)

    def check_media(self, media: Sequence[Addressed]) -> None:
        """Raises ApiError: the model takes none of that kind, there are too many, or they lie where nobody may look."""
        pictures = self.llm.pictures
        images, sounds = ([each for each in media if each.is_sound == kind] for kind in (False, True))
        if images and (pictures is None or "image" not in pictures.kinds):
            raise refuse(f"the model {self.names[0]} sees no images; send text alone", images[0].where)
        if sounds and (pictures is None or "audio" not in pictures.kinds):
            raise refuse(f"{sounds[0].where}: {NO_SOUND}", sounds[0].where)
        for name, found, what in (("image", images, "images"), ("audio", sounds, "recordings")):
            if pictures is not None and len(found) > (most := pictures.limits[name]):
                raise refuse(f"at most {most} {what} may be sent, got {len(found)}", found[-1].where)
        for image in images:
            if image.url[:5].lower() != "data:":
                check_url(image.url, self.settings.allowed_media_domains, image.where)

    async def load_media(self, media: Sequence[Addressed]) -> list[bytes | Sound]:
        """Files of images, and recordings. Raises ApiError and InvalidRequestError."""
        domains = self.settings.allowed_media_domains
        found: list[bytes | Sound] = []
        for each in media:
            if each.is_sound:
                found.append(read_sound(read_base64(each.url, each.where, MAX_SOUND_BYTES, "recording")))
            elif each.url[:5].lower() == "data:":
                found.append(read_data_url(each.url, each.where))
            else:
                found.append(await asyncio.to_thread(fetch, each.url, domains, each.where))
        return found

    async def conversation(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        media: Sequence[Addressed],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
        parse_special: bool = False,
    ) -> str | TextPrompt:
        """The prompt that a conversation is, with its images and recordings (``check_media`` has passed them).

        Args:
            tools: shown by the template; None: it shows none.
            extra: variables of the template (``chat_template_kwargs``).

        Raises:
            ApiError, InvalidRequestError: it cannot be rendered, or a medium cannot be read.
        """
        files = await self.load_media(media)
        pictures = self.llm.pictures
        source = self.templates.tool_source if tools else self.templates.source
        text = await self.templates.render(
            messages if pictures is None or source is None else shown(messages, source),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
            parse_special=parse_special,
        )
        return text if pictures is None or not files else picture_prompt(pictures, text, files)

    def need_tokenizer(self) -> Tokenizer:
        """Raises ApiError where the server has none."""
        if self.tokenizer is None:
            raise refuse("the server runs with --skip-tokenizer-init: it has no tokenizer")
        return self.tokenizer

    def check_model(self, name: str | None) -> str:
        """The name to show in the answer. Raises ApiError (404)."""
        if name is None:
            return self.names[0]
        if name not in self.names and (self.settings.served_model_name or name != self.info.model):
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; served: {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return name if name in self.names else self.names[0]

    def check_common(self, body: Sampling) -> str:
        """Checks of fields all generating routes have; returns the model's name to show."""
        if body.store:
            raise refuse("store: answers are not kept here; send false, or leave it out", "store")
        return self.check_model(body.model)

    @staticmethod
    def check_stream(body: PromptSampling | ResponsesRequest) -> None:
        """Raises ApiError for what goes only with a stream, or never with one."""
        if body.stream and isinstance(body, PromptSampling) and body.prompt_logprobs is not None:
            raise refuse(NO_STREAM, "prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise refuse("stream_options needs stream: true", "stream_options")
        if body.stream_options is not None and body.stream_options.include_obfuscation:
            raise refuse("the sizes of events are not obfuscated; leave it out", "stream_options.include_obfuscation")

    @contextlib.contextmanager
    def room(self, num_prompts: int, n: int) -> Iterator[None]:
        """Hold the places of one request's completions. Raises ApiError (400, 429)."""
        count = num_prompts * n
        if count > self.settings.max_sequences:
            raise refuse(
                f"{num_prompts} prompts times n={n} are {count} completions; one request may ask for "
                f"{self.settings.max_sequences} (--max-sequences)",
                "n",
            )
        self.lifecycle.admit(count)
        if self.throughput is not None:
            self.throughput.wake()
        try:
            yield
        finally:
            self.lifecycle.release(count)

    @contextlib.contextmanager
    def room_for_texts(self, count: int, field: str) -> Iterator[None]:
        """Hold the places of one request's texts. Raises ApiError (400, 429)."""
        if count > self.settings.max_inputs:
            raise refuse(
                f"{field} has {count} texts; one request may have {self.settings.max_inputs} (--max-inputs): send several",
                field,
            )
        self.lifecycle.admit(count, "texts", field)
        if self.throughput is not None:
            self.throughput.wake()
        try:
            yield
        finally:
            self.lifecycle.release(count)

    async def generate(
        self, prompts: list[Prompt], params: SamplingParams, *, salt: str | None, special: bool, final: bool
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(number of the prompt, what is new of it), until all are finished; or, with ``final``, each one whole.

        Raises:
            InvalidRequestError: before anything of any prompt was yielded.
            RequestFailedError: one failed inside the engine.
            ApiError: the server's end has cut it short.
        """
        try:
            async with contextlib.aclosing(self._generate(prompts, params, salt, special, final)) as outputs:
                async for each in outputs:
                    yield each
        except EngineDeadError:
            if self.lifecycle.phase is Phase.DRAINING:
                raise shutting_down(cut=True) from None
            raise

    async def _generate(
        self, prompts: list[Prompt], params: SamplingParams, salt: str | None, special: bool, final: bool
    ) -> Outputs:
        most = self.info.max_model_len
        lengths = [
            min(len(prompt), most) for prompt in prompts
        ]  # a text has about as many tokens as characters at most
        check_logprobs(params, min(params.max_tokens or most, most), len(prompts) * params.n, lengths)
        options: dict[str, Any] = {"cache_salt": salt, "add_special_tokens": special}
        options |= {"only_final": True} if final else {"delta": True}
        sources = [self.llm.generate(prompt, params, **options) for prompt in prompts]
        if len(sources) == 1:
            async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput, None]", sources[0])) as single:
                async for output in single:
                    _check(output)
                    yield 0, output
            return
        async with contextlib.aclosing(_merged(sources)) as outputs:
            async for number, output in outputs:
                _check(output)
                yield number, output


def _tokenizer(llm: AsyncLLM) -> Tokenizer | None:
    try:
        return llm.get_tokenizer()
    except InvalidRequestError:
        return None


def _check(output: RequestOutput) -> None:
    """Raises InvalidRequestError or RequestFailedError for one that did not end as requests do."""
    if output.error is not None:
        if output.error_parameter is not None:
            raise InvalidRequestError(output.error, output.error_parameter)
        raise RequestFailedError(output.error)
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise RequestFailedError("the request was aborted by the server's operator")


async def _merged(sources: list[AsyncIterator[RequestOutput]]) -> Outputs:
    """As they come. A source waits until its last output is taken, so that its next one holds more."""
    waiting: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def follow(number: int, source: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in source:
                await waiting.put((number, output))
            await waiting.put((number, None))
        except Exception as error:
            await waiting.put((number, error))
        finally:
            await cast("AsyncGenerator[RequestOutput, None]", source).aclose()

    tasks = [asyncio.create_task(follow(i, source)) for i, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            number, item = await waiting.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it when the client disconnects. The body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    watch = scope.get("state", {}).get(WHEN_GONE)
    if watch is None:
        return await _beside(receive, work)
    task, gone = cast("asyncio.Task[Any]", asyncio.current_task()), False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    if not watch(leave):
        watch(None)
        work.close()
        raise ClientGoneError
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # nobody else wants the end of this task
            raise ClientGoneError from None
        raise
    finally:
        watch(None)


async def _beside(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """As ``until_gone``, where nothing but ``receive`` tells that the client has left."""
    body = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((body, gone), return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            return body.result()
        raise ClientGoneError
    finally:
        body.cancel()
        gone.cancel()
        await asyncio.gather(body, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def time_limit(seconds: float) -> contextlib.AbstractAsyncContextManager[None]:
    """Raises ApiError (504) when the block takes longer; 0 is no limit."""
    return _limited(seconds) if seconds else NO_LIMIT


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ApiError(
            504, f"the request took longer than {seconds:g} seconds (--request-timeout)", None, "timeout"
        ) from None


def log_usage(scope: Scope, prompt_tokens: int, completion_tokens: int, finish: str | None) -> None:
    """What the request's log line says of its generation."""
    fields = scope.get(LOG_FIELDS)
    if fields is not None:
        fields |= {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "finish": finish}


def log_error(scope: Scope, code: str | None) -> None:
    """How the request's log line says that it did not end well: a stream's status was sent before."""
    fields = scope.get(LOG_FIELDS)
    if fields is not None:
        fields["error"] = code or "invalid_request"
