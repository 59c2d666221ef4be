"""``AsyncLLM``: requests that stream, for servers."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headway.api import frontend
from headway.api.frontend import ChatOptions, Message
from headway.api.hub import Hub, Processor
from headway.api.inputs import Door, PreparedRequest, default_params
from headway.api.lanes import Lane
from headway.api.long_texts import LONG_TEXT_CHARS, TextLanes
from headway.api.output_processor import OutputProcessor
from headway.api.pictures.prompts import image_bytes
from headway.api.pooling.door import PoolingDoor, check_task
from headway.api.pooling.online import AsyncPooling
from headway.api.pooling.requests import PoolingProcessor
from headway.api.prompts import Prompt, TextPrompt
from headway.api.request_metrics import RequestMetrics
from headway.core.config import EngineArgs
from headway.core.encode import EncoderItem
from headway.core.errors import EngineDeadError, InvalidRequestError
from headway.core.hearing import Alignment, SpeechRules
from headway.core.messages import EngineStats, ModelInfo
from headway.core.outputs import RequestOutput
from headway.core.params import SamplingParams
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.pictures.door import Pictures
    from headway.api.tokenizer import Tokenizer

SEEING_THREADS = 2
"""They wait for processes that prepare images."""
MAX_WAITING_IMAGE_BYTES = 128 * 2**20
"""Of all images that wait to be prepared."""
COMPILING_THREADS = 4
"""They wait for compiling processes, of which there are as many."""
MAX_WAITING_GRAMMARS = 16 * 1024 * 1024
"""Characters of all grammars that wait to be compiled."""


class AsyncLLM(AsyncPooling):
    """A model and its engine, for concurrent streaming requests on one asyncio event loop.

    The engine runs in its own process unless ``multiprocess=False`` (then in a thread). Arguments and errors as for
    ``LLM``. Constructing it blocks until the model is loaded. Installs no signal handlers.

    Attributes:
        request_metrics: times and sizes of its requests so far; for the event loop's thread.
    """

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        args = EngineArgs(model=model, **engine_args)
        self._tokenizer = frontend.load_tokenizer(args)
        client = frontend.connect(args, own_process=True, asynchronous=True)
        self._info = client.info
        pictures = frontend.load_pictures(args, self._info, self._tokenizer)
        self._door = Door(self._info, self._tokenizer, args.seed, client.learn, pictures)
        self._seeing = Lane("preparing of images", SEEING_THREADS, MAX_WAITING_IMAGE_BYTES)
        self.request_metrics = RequestMetrics(self._info.max_model_len)
        # Threads of their own for each kind of work: a flood of one must not hold up another, or the engine's figures.
        self._compiling = Lane("compiling of grammars", COMPILING_THREADS, MAX_WAITING_GRAMMARS)
        pools = self._info.tasks[0].pools
        most = self._info.max_model_len - (not pools)
        self._texts = None if self._tokenizer is None else TextLanes(self._tokenizer, most, pools)
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="headway-stats")
        self._pools = PoolingDoor(self._info, self._tokenizer)
        self._processor: Processor
        if pools:
            self._processor = PoolingProcessor(self.request_metrics)
        else:
            self._processor = OutputProcessor(self._tokenizer, self.request_metrics)
        self._hub = Hub(client, self._processor)
        self._finalizer = weakref.finalize(self, self._hub.close)
        self._chat = frontend.ChatRenderer(self._tokenizer)
        self._numbers = itertools.count()

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has stopped; None while it lives."""
        return self._hub.dead

    def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self._tokenizer

    @property
    def pictures(self) -> Pictures | None:
        """How pictures are prepared; None: the model sees none."""
        return self._door.pictures

    @property
    def has_chat_template(self) -> bool:
        return self._chat.has_template

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config.json over Headway's defaults."""
        return default_params(self._info)

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has stopped."""
        if self._hub.dead is not None:
            raise EngineDeadError(str(self._hub.dead))

    async def wait_dead(self) -> EngineDeadError:
        """Sleep until the engine has stopped, and say why. For whoever has to act although no request is open."""
        return await self._hub.wait_dead()

    async def stats(self) -> EngineStats:
        """The engine's counters. Waits as long as the engine does not answer. Raises EngineDeadError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._asking, self._hub.client.stats)
        except RuntimeError:  # its thread has ended with ``shutdown``
            raise EngineDeadError("the engine is shut down") from None

    def signs_of_life(self) -> tuple[float, float | None]:
        """When the engine was last heard of (``monotonic``), and its processor time in seconds, where that can be told."""
        return self._hub.heard, self._hub.client.processor_seconds()

    async def tokenize(self, prompt: str | TextPrompt, add_special_tokens: bool = True) -> list[int]:
        """All ids of ``prompt``, however many, without holding up the event loop; with pictures and recordings those that
        stand for them, as ``generate`` gives them to the model.

        Raises:
            InvalidRequestError: there is no tokenizer, the text takes too much time or memory, or a picture cannot be read.
            BusyError: too much is being tokenised, or too many pictures are being read.
        """
        lanes = self._lanes()
        if not isinstance(prompt, str) and "multi_modal_data" in prompt:
            prompt, _, furnished = await self._see(prompt)
            add_special_tokens = add_special_tokens and not furnished
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        return await lanes.encode(text, whole=True, add_special_tokens=add_special_tokens)

    async def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; as ``tokenize``."""
        return await self._lanes().decode(ids, skip_special_tokens)

    async def token_texts(self, ids: list[int]) -> list[str]:
        """What each token alone reads as; as ``tokenize``."""
        name = self.get_tokenizer().token_text
        if len(ids) <= LONG_TEXT_CHARS:
            return list(map(name, ids))
        return await self._lanes().beside(lambda: list(map(name, ids)), len(ids))

    def _lanes(self) -> TextLanes:
        self.get_tokenizer()
        assert self._texts is not None
        return self._texts

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        media: Sequence[EncoderItem] = (),
        speech: SpeechRules | None = None,
        align: Alignment | None = None,
        delta: bool = False,
        only_final: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding its state as it grows; the last one is ``finished``.

        A consumer slower than the engine sees fewer, larger steps. Leaving the loop, cancelling the task or closing the
        generator aborts the request in the engine.

        Args:
            request_id: name for outputs and ``abort``; need not be unique, the engine never sees it.
            cache_salt: only equal salts share cached prefixes.
            add_special_tokens: False if the text brings its own (a rendered chat template does).
            media, speech, align: see ``Door.prepare``.
            delta: yield only what is new each time (completions that did not change are left out).
            only_final: yield once, when all is finished: nothing wakes up in between.

        Raises:
            InvalidRequestError: before anything is submitted.
            EngineDeadError: the engine stopped.
        """
        arrived = monotonic()
        check_task(self._info, Task.GENERATE)
        self.check_health()
        self._hub.attach()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "cache_salt": cache_salt}
        if media:
            options |= {"media": media, "speech": speech, "align": align}
        prepared = await self._prepare(prompt, params, options)
        assert isinstance(self._processor, OutputProcessor)
        request = self._processor.open(prepared, str(next(self._numbers)) if request_id is None else request_id)
        news = self._hub.open(request, only_final)
        try:
            request.arrived = arrived  # tokenising the prompt is part of what the caller waits for
            self._hub.add(prepared.children)
            while True:
                await news.wait()
                news.clear()
                if not request.finished:
                    self.check_health()
                output = request.delta() if delta else request.snapshot()
                if output.outputs or output.finished:
                    yield output
                if output.finished:
                    return
        finally:
            self._hub.leave(request)

    async def _see(self, prompt: Mapping[str, Any]) -> tuple[Any, list[EncoderItem], bool]:
        """As ``Door.with_pictures``, of pictures prepared beside the event loop."""
        seen = await self._seeing.run(lambda job: self._door.see(prompt, job), image_bytes(prompt))
        return self._door.with_pictures(prompt, seen)

    async def _prepare(self, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> PreparedRequest:
        """As the door's, but whatever takes long happens beside the event loop."""
        compiles = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if compiles:
            options["grammar"] = self._door.known_grammar(params)
        if self._info.encoder and not options.get("media"):  # two texts, or a recording
            size = len(prompt) if isinstance(prompt, str) else LONG_TEXT_CHARS
            make = partial(self._door.prepare, prompt, params, **options)
            return await self._texts.beside(make, size) if self._texts is not None else make()
        if isinstance(prompt, dict) and "multi_modal_data" in prompt:
            prompt, options["media"], furnished = await self._see(prompt)
            options["add_special_tokens"] = options["add_special_tokens"] and not furnished
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(prompt, dict) and isinstance(text, str) and prompt.get("parse_special") is False:
            text = self._door.as_text(text)
        if isinstance(text, str) and text and self._texts is not None:
            options["ids"] = await self._texts.encode(text, add_special_tokens=options["add_special_tokens"])
        prepare = partial(self._door.prepare, prompt, params, **options)
        if compiles and options["grammar"] is None:
            return await self._compiling.run(lambda job: prepare(job=job), _grammar_size(params))
        words = sum(map(len, params.bad_words)) if isinstance(params, SamplingParams) else 0
        if words > LONG_TEXT_CHARS and self._texts is not None:
            return await self._texts.beside(prepare, words)
        return prepare()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: ChatOptions | None = None,
        cache_salt: str | None = None,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation; as ``generate``."""
        check_task(self._info, Task.GENERATE)
        [talk] = frontend.conversations([messages])
        prompt = frontend.chat_prompt(self._door, self._chat, talk, options or ChatOptions())
        outputs = self.generate(
            prompt, sampling_params, request_id, cache_salt=cache_salt, add_special_tokens=False, delta=delta
        )
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> None:
        """Abort every open request of exactly this name; its generator yields a last output with "abort" and ends."""
        for request in self._processor.requests():
            if request.request_id == request_id:
                self._hub.abort_in_engine(self._processor.drop(request))
                self._hub.wake(request)

    def shutdown(self) -> None:
        """Stop the engine; open generators raise EngineDeadError. Safe to call twice."""
        self._door.close()
        self._finalizer()
        self._compiling.close()
        self._seeing.close()
        if self._texts is not None:
            self._texts.close()
        self._asking.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


def _grammar_size(params: SamplingParams) -> int:
    """About how long a grammar is: the smaller ones go first."""
    wanted = params.structured_outputs
    assert wanted is not None
    given = wanted.regex or wanted.grammar or (wanted.json if isinstance(wanted.json, str) else None)
    return len(given) if given is not None else len(repr(wanted.choice or wanted.json))
