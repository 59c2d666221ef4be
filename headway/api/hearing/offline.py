"""``LLM.transcribe``: many recordings at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.api.encoder_prompts import audio_item
from headway.api.hearing.transcriber import Transcriber, TranscriptionOptions
from headway.api.hearing.transcript import Segment, Transcript, Word
from headway.api.hearing.windows import cut
from headway.api.inputs import PreparedRequest
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError, RequestFailedError
from headway.core.outputs import CompletionOutput, RequestOutput
from headway.core.params import SamplingParams
from headway.multimodal.audio.decode import RATE, check_samples, decode_audio
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.wav import Floats

MOST_SECONDS = 24 * 3600.0
"""Of a recording that the caller of a library brings."""
Prepare = Callable[..., PreparedRequest]
Run = Callable[[list[PreparedRequest]], list[RequestOutput]]


@dataclass(slots=True)
class _Recording:
    """One of a call's recordings. ``segments`` are those so far, ``words`` their tokens, and ``timed``
    these with times."""

    samples: Floats
    spans: list[tuple[int, int]]
    options: TranscriptionOptions
    language: str = ""
    no_speech: float | None = None
    segments: list[Segment] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    timed: list[Word] = field(default_factory=list)

    def item(self, window: int, transcriber: Transcriber) -> EncoderItem:
        start, end = self.spans[window]
        return audio_item(self.samples[start:end], transcriber.hearing)

    def seconds(self, window: int) -> tuple[float, float]:
        start, end = self.spans[window]
        return start / RATE, end / RATE


def load(audio: object) -> Floats:
    """Samples float32 [n] at 16 kHz, of a path, a file's bytes, or (samples, rate).

    Raises:
        InvalidRequestError: nothing can be made of it.
    """
    try:
        if isinstance(audio, str | Path):
            audio = Path(audio).read_bytes()
        if isinstance(audio, bytes):
            return decode_audio(audio, most_seconds=MOST_SECONDS)
        if isinstance(audio, tuple) and len(audio) == 2:
            return check_samples(*audio, most_seconds=MOST_SECONDS)
    except (AudioError, OSError) as error:
        raise InvalidRequestError(f"audio: {error}", "audio") from None
    raise InvalidRequestError("audio must be a path, a file's bytes or (samples, rate)", "audio")


def transcribe(
    audios: Sequence[object],
    options: Sequence[TranscriptionOptions],
    transcriber: Transcriber,
    prepare: Prepare,
    run: Run,
) -> list[Transcript]:
    """Transcripts, in the order of the recordings.

    Args:
        options: of each.
        prepare: ``Door.prepare``.
        run: serves requests, in order.
    """
    hearing = transcriber.hearing
    recordings = []
    for audio, wanted in zip(audios, options, strict=True):
        checked, samples = transcriber.check(wanted), load(audio)
        language = checked.language or transcriber.only_language
        recordings.append(_Recording(samples, cut(samples, hearing.window_seconds), checked, language))
    unknown = [each for each in recordings if transcriber.detects and not each.language]
    asked = [_ask(prepare, *transcriber.detection(), each.item(0, transcriber)) for each in unknown]
    for each, answer in zip(unknown, run(asked) if asked else [], strict=True):
        each.language, each.no_speech = transcriber.detected(_only(answer))
    for window in range(max((len(each.spans) for each in recordings), default=0)):
        # Windows that need not wait for their text are all asked at once, in the first turn.
        going = [each for each in recordings if window < len(each.spans)]
        free = [each for each in going if window == 0 or each.options.condition_on_previous_text]
        places = [(each, n) for each in free for n in _windows(each, window)]
        drawn = _drawn(places, transcriber, prepare, run)
        for (each, n), found in zip(places, drawn, strict=True):
            _take(each, n, *found, transcriber)
        _place(places, [answer for answer, _ in drawn], transcriber, prepare, run)
    return [_finished(each) for each in recordings]


def _drawn(
    places: Sequence[tuple[_Recording, int]], transcriber: Transcriber, prepare: Prepare, run: Run
) -> list[tuple[CompletionOutput, TranscriptionOptions]]:
    """Answers for windows of recordings, and how each was asked last."""
    found: dict[int, tuple[CompletionOutput, TranscriptionOptions]] = {}
    asking = {i: recording.options for i, (recording, _) in enumerate(places)}
    while asking:
        answers = run([_window(prepare, transcriber, *places[i], options) for i, options in asking.items()])
        again: dict[int, TranscriptionOptions] = {}
        for (i, options), answer in zip(asking.items(), answers, strict=True):
            found[i] = _only(answer), options
            recording, window = places[i]
            hotter = transcriber.hotter(*found[i], recording.no_speech if window == 0 else None)
            if hotter is not None:
                again[i] = hotter
        asking = again
    return [found[i] for i in range(len(places))]


def _place(
    places: Sequence[tuple[_Recording, int]],
    answers: Sequence[CompletionOutput],
    transcriber: Transcriber,
    prepare: Prepare,
    run: Run,
) -> None:
    """Add the words of windows to their recordings, where they are wanted."""
    asked: list[PreparedRequest] = []
    wanted: list[tuple[_Recording, int, CompletionOutput]] = []
    for (recording, window), answer in zip(places, answers, strict=True):
        start, end = recording.spans[window]
        question = None
        if recording.options.word_timestamps:
            question = transcriber.alignment(answer.token_ids, recording.options, recording.language, end - start)
        if question is not None:
            ids, params, align = question
            asked.append(_ask(prepare, ids, params, recording.item(window, transcriber), align=align))
            wanted.append((recording, window, answer))
    for (recording, window, answer), placed in zip(wanted, run(asked) if asked else [], strict=True):
        _only(placed)
        span = recording.seconds(window)
        recording.timed += transcriber.timed(answer.token_ids, placed.aligned or [], span, recording.language)


def _windows(recording: _Recording, window: int) -> Sequence[int]:
    return [window] if recording.options.condition_on_previous_text else range(len(recording.spans))


def _window(
    prepare: Prepare, transcriber: Transcriber, recording: _Recording, window: int, options: TranscriptionOptions
) -> PreparedRequest:
    before = recording.words if options.condition_on_previous_text else ()
    ids = transcriber.prompt(options, recording.language, before)
    item = recording.item(window, transcriber)
    return _ask(prepare, ids, transcriber.params(options), item, speech=transcriber.rules(options))


def _ask(prepare: Prepare, ids: list[int], params: SamplingParams, item: EncoderItem, **more: Any) -> PreparedRequest:
    return prepare({"prompt_token_ids": ids}, params, media=[item], **more)


def _take(
    recording: _Recording,
    window: int,
    answer: CompletionOutput,
    options: TranscriptionOptions,
    transcriber: Transcriber,
) -> None:
    no_speech = recording.no_speech if window == 0 else None
    number, span = len(recording.segments), recording.seconds(window)
    recording.segments += transcriber.segments(answer, span, options, number, no_speech)
    recording.words += transcriber.words(answer.token_ids)


def _only(answer: RequestOutput) -> CompletionOutput:
    """Raises RequestFailedError, or InvalidRequestError where the request is to blame: it failed."""
    [found] = answer.outputs
    if found.finish_reason == "error":
        if answer.error is not None and answer.error_parameter is not None:
            raise InvalidRequestError(answer.error, answer.error_parameter)
        raise RequestFailedError(answer.error or "the engine could not transcribe")
    return found


def _finished(recording: _Recording) -> Transcript:
    text = "".join(segment.text for segment in recording.segments).strip()
    words = recording.timed if recording.options.word_timestamps else None
    return Transcript(text, recording.language, len(recording.samples) / RATE, recording.segments, words)
