"""``LLM``: prompts in, finished outputs back."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from headway.api import frontend
from headway.api.frontend import ChatOptions, Message
from headway.api.hearing.transcriber import Transcriber, TranscriptionOptions
from headway.api.hearing.transcript import Transcript
from headway.api.inputs import Door, PreparedRequest, default_params, params_list
from headway.api.output_processor import OpenRequest, OutputProcessor
from headway.api.pooling.door import PoolingDoor, check_task
from headway.api.pooling.offline import PoolingMethods, PoolingRunner
from headway.api.prompts import Prompt, prompt_list
from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError, InvalidRequestError
from headway.core.messages import AddRequest, EngineStats, ModelInfo, RequestUpdate, Update
from headway.core.outputs import RequestOutput
from headway.core.params import SamplingParams
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer


PART_TOKENS = 8192
"""Prompt tokens that are checked and submitted before the engine takes a turn: enough for a step, so that the device starts on
the first prompts while the host still checks and adds the others."""


class LLM(PoolingMethods):
    """A model and its engine, for batch work. What it serves is the model's: ``model_info.tasks``.

    >>> with LLM("smollm2") as llm:
    ...     [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))

    Installs no signal handlers. Close it, use it in ``with``, or let it go: the engine ends with it.

    Args:
        model: a folder, a GGUF file, a hub name, or "smollm2".
        **engine_args: fields of ``headway.core.config.EngineArgs``.

    Raises:
        UnknownParameterError: an unknown engine argument.
        ConfigError, ModelError, OutOfMemoryError: the engine cannot be built.
    """

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        args = EngineArgs(model=model, **engine_args)
        self._tokenizer = frontend.load_tokenizer(args)
        self._client = frontend.connect(args, own_process=False, asynchronous=False)
        pictures = frontend.load_pictures(args, self._client.info, self._tokenizer)
        self._door = Door(self._client.info, self._tokenizer, args.seed, self._client.learn, pictures)
        self._processor = OutputProcessor(self._tokenizer)
        self._chat = frontend.ChatRenderer(self._tokenizer)
        self._numbers = itertools.count()
        self._running = threading.Lock()
        self._pooling = PoolingRunner(self._client, PoolingDoor(self._client.info, self._tokenizer), self._running)

    @property
    def model_info(self) -> ModelInfo:
        return self._client.info

    def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given none: the model's generation_config.json over Headway's defaults."""
        return default_params(self._client.info)

    def stats(self) -> EngineStats:
        return self._client.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        The engine starts on the first prompts while the others are still checked; if one of those cannot be served, what was
        started is aborted. A request that fails inside the engine ends with finish_reason "error" and says why in ``error``;
        the others are not affected. Ctrl-C aborts the whole call and leaves the engine usable.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}`` (both take a
                "cache_salt"), or a list of these.
            sampling_params: one for all prompts, or one for each; None: ``get_default_sampling_params()``.
            use_tqdm: show progress on stderr if that is a terminal.

        Raises:
            InvalidRequestError: a request cannot be served.
            EngineDeadError: the engine stopped.
        """
        check_task(self._client.info, Task.GENERATE)
        wanted = prompt_list(prompts)
        params = self._params(sampling_params, len(wanted))
        return self._run((self._door.prepare(p, q) for p, q in zip(wanted, params)), len(wanted), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; arguments as in ``generate`` and ``ChatOptions``."""
        check_task(self._client.info, Task.GENERATE)
        talks = frontend.conversations(messages)
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            parse_special=parse_special,
            template_kwargs=chat_template_kwargs or {},
        )
        prompts = [frontend.chat_prompt(self._door, self._chat, talk, options) for talk in talks]
        params = self._params(sampling_params, len(prompts))
        prepared = (self._door.prepare(p, q, add_special_tokens=False) for p, q in zip(prompts, params))
        return self._run(prepared, len(prompts), use_tqdm)

    def transcribe(
        self,
        audio: Any,
        options: TranscriptionOptions | Sequence[TranscriptionOptions] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Transcript]:
        """Texts of recordings, of any length; they are cut into windows where it is quiet.

        Args:
            audio: a path, a file's bytes, (samples, rate), or a list of these. WAV needs nothing; FLAC, MP3 and OGG need
                soundfile.
            options: one for all, or one for each.

        Raises:
            InvalidRequestError: the model does not hear, or a recording or an option cannot be used.
        """
        from headway.api.hearing.offline import transcribe  # late: text needs none of it

        wanted = audio if isinstance(audio, list) else [audio]
        each = [options or TranscriptionOptions()] * len(wanted) if not isinstance(options, Sequence) else list(options)
        if len(each) != len(wanted):
            raise InvalidRequestError(f"{len(wanted)} recordings came with {len(each)} options", "options")
        transcriber = Transcriber(self._client.info, self._tokenizer)

        def run(prepared: list[PreparedRequest]) -> list[RequestOutput]:
            return self._run(iter(prepared), len(prepared), use_tqdm)

        return transcribe(wanted, each, transcriber, self._door.prepare, run)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        return params_list(self.get_default_sampling_params() if given is None else given, count)

    def _run(self, prepared: Iterator[PreparedRequest], count: int, use_tqdm: bool) -> list[RequestOutput]:
        """Serve the ``count`` requests that ``prepared`` makes one by one."""
        with self._running:
            requests: list[OpenRequest] = []
            try:
                with Progress(count, enabled=use_tqdm and sys.stderr.isatty()) as progress:
                    self._drain(prepared, count, requests, progress)
            except BaseException:
                left = [request_id for request in requests for request_id in self._processor.drop(request)]
                with contextlib.suppress(EngineDeadError):
                    self._client.abort(left)
                raise
            return [request.snapshot() for request in requests]

    def _drain(
        self, prepared: Iterator[PreparedRequest], count: int, requests: list[OpenRequest], progress: Progress
    ) -> None:
        """Submit part after part, polling in between, and poll until all requests have finished. Fills ``requests``."""
        num_open = count
        for part in self._parts(prepared, count, requests):
            self._client.add(part)
            num_open -= self._take(self._client.poll(0.0), progress)
        while num_open:
            updates = self._client.poll(None)
            num_open -= self._take(updates, progress)
            if not updates and not self._client.has_work():
                raise EngineDeadError(f"the engine lost {num_open} requests")

    def _take(self, updates: list[Update], progress: Progress) -> int:
        """Hand updates to their requests; returns how many requests have finished with them."""
        touched, aborts = self._processor.apply(cast("list[RequestUpdate]", updates))  # nothing pools here
        if aborts:
            self._client.abort(aborts)
        finished = [request for request in touched if request.finished]
        progress.advance(finished)
        return len(finished)

    def _parts(
        self, prepared: Iterator[PreparedRequest], count: int, requests: list[OpenRequest]
    ) -> Iterator[list[AddRequest]]:
        """The first part as soon as it is checked, the others when all are: no wrong prompt is found late."""
        if count:
            yield self._open_part(prepared, requests)
        others = []
        while len(requests) < count:
            others.append(self._open_part(prepared, requests))
        yield from others

    def _open_part(self, prepared: Iterator[PreparedRequest], requests: list[OpenRequest]) -> list[AddRequest]:
        """Open the next requests, with PART_TOKENS prompt tokens or a few more; fewer at the end."""
        part: list[AddRequest] = []
        tokens = 0
        for each in prepared:
            requests.append(self._processor.open(each, str(next(self._numbers))))
            part += each.children
            tokens += len(each.children) * len(each.prompt_token_ids)
            if tokens >= PART_TOKENS:
                break
        return part

    def close(self) -> None:
        """Stop the engine and free its memory. Safe to call twice."""
        for part in ("_door", "_client"):  # absent when __init__ failed
            if (owned := getattr(self, part, None)) is not None:
                owned.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Progress:
    """One bar over a call's requests, with tokens per second."""

    def __init__(self, num_requests: int, enabled: bool) -> None:
        self._num_requests = num_requests
        self._enabled = enabled
        self._bar: Any = None
        self._num_input = self._num_output = 0
        self._start = 0.0

    def __enter__(self) -> Progress:
        self._start = perf_counter()
        if self._enabled:
            from tqdm import tqdm

            quiet = type("QuietBar", (tqdm,), {"monitor_interval": 0})  # a library leaves no monitor thread behind
            self._bar = quiet(total=self._num_requests, desc="Processed prompts", dynamic_ncols=True)
        return self

    def advance(self, finished: list[OpenRequest]) -> None:
        """Count requests that have just finished."""
        if self._bar is None or not finished:
            return
        self._num_input += sum(len(request.prepared.prompt_token_ids) for request in finished)
        self._num_output += sum(request.num_generated for request in finished)
        seconds = max(perf_counter() - self._start, 1e-9)
        speed_in, speed_out = self._num_input / seconds, self._num_output / seconds
        speed = f"est. speed input: {speed_in:.2f} toks/s, output: {speed_out:.2f} toks/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(len(finished))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
