"""Transcribing over ``AsyncLLM``: windows run side by side, and their texts come in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from headway.api.encoder_prompts import audio_item
from headway.api.hearing.transcriber import Transcriber, TranscriptionOptions
from headway.api.hearing.transcript import Segment, Word
from headway.api.hearing.windows import cut
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError, RequestFailedError
from headway.core.outputs import CompletionOutput, RequestOutput
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.wav import Floats

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM

AT_ONCE: Final = 8
"""Windows of one recording that run side by side: a long one leaves room for others."""


@dataclass(slots=True)
class Piece:
    """What is new of a transcript.

    Attributes:
        text: to append.
        language: of the whole recording.
        segments: of a window that has ended with this piece.
        words: of that window, where they are wanted.
        num_tokens: of that window: those that it read and those that it wrote.
    """

    text: str
    language: str
    segments: list[Segment] = field(default_factory=list)
    num_tokens: tuple[int, int] = (0, 0)
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recording:
    """What all windows of a recording have in common.

    Attributes:
        samples: float32 [n] at 16 kHz.
        spans: first sample and end of each window.
        no_speech: probability that the first window has no speech; None: nobody asked.
    """

    llm: AsyncLLM
    transcriber: Transcriber
    samples: Floats
    spans: list[tuple[int, int]]
    options: TranscriptionOptions
    language: str
    no_speech: float | None


async def transcribe(
    llm: AsyncLLM, transcriber: Transcriber, samples: Floats, options: TranscriptionOptions, *, final: bool = False
) -> AsyncGenerator[Piece, None]:
    """A transcript as it grows; leaving it aborts what still runs.

    Args:
        samples: float32 [n] at 16 kHz.
        options: checked ones.
        final: a piece for each window, when it has ended.

    Raises:
        RequestFailedError: a window failed in the engine.
    """
    spans = cut(samples, transcriber.hearing.window_seconds)
    first = await asyncio.to_thread(audio_item, samples[slice(*spans[0])], transcriber.hearing)
    language, no_speech = options.language or transcriber.only_language, None
    if transcriber.detects and not language:
        ids, params = transcriber.detection()
        language, no_speech = transcriber.detected(await _answer(llm, ids, params, first))
    recording = Recording(llm, transcriber, samples, spans, options, language, no_speech)
    windows = _one_by_one(recording) if options.condition_on_previous_text else _side_by_side(recording)
    number, sent = 0, ""
    async with contextlib.aclosing(windows) as outputs:
        async for window, output, asked, words in outputs:
            [answer] = output.outputs
            text = transcriber.text(answer.token_ids)
            if not output.finished:
                text = text.rstrip("\ufffd")  # the rest of a character is still to come
                if not final and len(text) > len(sent):
                    yield Piece(text[len(sent) :], language)
                    sent = text
                continue
            span = (spans[window][0] / RATE, spans[window][1] / RATE)
            segments = transcriber.segments(answer, span, asked, number, no_speech if window == 0 else None)
            number += len(segments)
            tokens = len(output.prompt_token_ids), len(answer.token_ids)
            yield Piece(text[len(sent) :], language, segments, tokens, words)
            sent = ""


Asked = tuple[RequestOutput, TranscriptionOptions, list[Word]]
Windows = AsyncGenerator[tuple[int, RequestOutput, TranscriptionOptions, list[Word]], None]


async def _one_by_one(recording: Recording) -> Windows:
    """Each is given the text of those before it."""
    words: list[int] = []
    for window in range(len(recording.spans)):
        async with contextlib.aclosing(_window(recording, window, words)) as outputs:
            async for output, asked, timed in outputs:
                yield window, output, asked, timed
                if output.finished:
                    words = words + recording.transcriber.words(output.outputs[0].token_ids)


async def _side_by_side(recording: Recording) -> Windows:
    """Several run; their outputs come window by window."""
    queues: list[asyncio.Queue[Asked | BaseException]] = [asyncio.Queue() for _ in recording.spans]
    room = asyncio.Semaphore(AT_ONCE)

    async def follow(window: int) -> None:
        async with room:
            try:
                async with contextlib.aclosing(_window(recording, window, ())) as outputs:
                    async for output in outputs:
                        queues[window].put_nowait(output)
            except Exception as error:
                queues[window].put_nowait(error)

    tasks = [asyncio.create_task(follow(window)) for window in range(len(queues))]
    try:
        for window, queue in enumerate(queues):
            while True:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                yield window, *found
                if found[0].finished:
                    break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _window(recording: Recording, window: int, before: Sequence[int]) -> AsyncGenerator[Asked, None]:
    """Outputs of a window, how it was asked, and with the last one its words, where they are wanted; those that went wrong are
    not given. ``before``: words of the windows before it."""
    transcriber, options, span = recording.transcriber, recording.options, recording.spans[window]
    item = await asyncio.to_thread(audio_item, recording.samples[slice(*span)], transcriber.hearing)
    ids, rules = transcriber.prompt(options, recording.language, before), transcriber.rules(options)
    no_speech = None if window else recording.no_speech
    asking: TranscriptionOptions | None = options
    while asking is not None:
        asked, asking = asking, None
        source = recording.llm.generate(
            {"prompt_token_ids": ids}, transcriber.params(asked), media=[item], speech=rules
        )
        async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput, None]", source)) as outputs:
            async for output in outputs:
                _check(output)
                if output.finished:
                    asking = transcriber.hotter(output.outputs[0], asked, no_speech)
                if asking is None and (output.finished or not asked.temperature_fallback):
                    wanted = output.finished and asked.word_timestamps
                    yield output, asked, await _words(recording, output, asked, span, item) if wanted else []


async def _words(
    recording: Recording, output: RequestOutput, options: TranscriptionOptions, span: tuple[int, int], item: EncoderItem
) -> list[Word]:
    """Of a window that has ended."""
    transcriber, language, tokens = recording.transcriber, recording.language, output.outputs[0].token_ids
    question = transcriber.alignment(tokens, options, language, span[1] - span[0])
    if question is None:
        return []
    ids, params, align = question
    source = recording.llm.generate({"prompt_token_ids": ids}, params, media=[item], align=align, only_final=True)
    async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput, None]", source)) as outputs:
        async for placed in outputs:
            _check(placed)
    return transcriber.timed(tokens, placed.aligned or [], (span[0] / RATE, span[1] / RATE), language)


async def _answer(llm: AsyncLLM, ids: list[int], params: Any, item: EncoderItem) -> CompletionOutput:
    source: AsyncIterator[RequestOutput]
    source = llm.generate({"prompt_token_ids": ids}, params, media=[item], only_final=True)
    answers = []
    async for output in source:
        _check(output)
        answers += output.outputs
    [answer] = answers
    return answer


def _check(output: RequestOutput) -> None:
    """Raises RequestFailedError or InvalidRequestError for one that did not end as requests do."""
    if output.error is not None:
        if output.error_parameter is not None:
            raise InvalidRequestError(output.error, output.error_parameter)
        raise RequestFailedError(output.error)
    if any(each.finish_reason == "abort" for each in output.outputs):
        raise RequestFailedError("the request was aborted by the server's operator")
