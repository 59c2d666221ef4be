"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, as OpenAI's clients use them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headway.api.hearing.online import Piece, transcribe
from headway.api.hearing.transcriber import Transcriber, TranscriptionOptions
from headway.api.hearing.transcript import Segment, Word, as_srt, as_vtt
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.wav import Floats
from headway.server.errors import refuse
from headway.server.hearing.hearing import Hearing
from headway.server.hearing.multipart import Form, read_form
from headway.server.service import Service, log_usage
from headway.server.sse import encode, event, respond

FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES: Final = ("segment", "word")
TIMED: Final = frozenset({"srt", "verbose_json", "vtt"})
FIELDS: Final = frozenset(
    {"model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]",
     "timestamp_granularities", "stream", "seed", "temperature_fallback"}
)  # fmt: skip


async def transcriptions(service: Service, request: Request) -> Response:
    """Text of a recording, in its own language."""
    return await _answer(service, request, "transcribe")


async def translations(service: Service, request: Request) -> Response:
    """Text of a recording, in English."""
    return await _answer(service, request, "translate")


async def _answer(service: Service, request: Request, task: str) -> Response:
    hearing = service.hearing
    if hearing is None:
        raise refuse(f"{service.names[0]} does not hear; ask a server that runs a model such as Whisper", "model",
                     "model_not_supported")  # fmt: skip
    body = await hearing.body.read_bytes(request)
    form = read_form(request.headers.get("content-type", ""), body)
    call = Call(service, hearing, request, form, task)
    call.samples, call.file = await hearing.decoder.decode(call.file), b""
    return await respond(request, call, call.stream, service.settings.request_timeout)


class Call:
    """One checked request."""

    samples: Floats

    def __init__(self, service: Service, hearing: Hearing, request: Request, form: Form, task: Any) -> None:
        transcriber = hearing.transcriber
        self._service, self._hearing, self._transcriber, self._scope = service, hearing, transcriber, request.scope
        self._task = task
        known = FIELDS - (
            {"language", "timestamp_granularities[]", "timestamp_granularities"} if task == "translate" else set()
        )
        for name in form.fields:
            if name not in known:
                raise refuse(f"{name!r:.80} is not a field of this route; it has {', '.join(sorted(known))}", name[:80])
        for name in form.files:
            if name != "file":
                raise refuse(f"{name!r:.80} came as a file; the recording is the field 'file'", name[:80])
        service.check_model(form.one("model"))
        if "file" not in form.files:
            raise refuse("the form has no file; send the recording as the field 'file', with a file name", "file")
        self.file = form.files["file"]
        if not self.file:
            raise refuse("the file is empty", "file")
        self._format = form.one("response_format") or "json"
        if self._format not in FORMATS:
            raise refuse(
                f"response_format must be one of {', '.join(FORMATS)}, got {self._format!r:.40}", "response_format"
            )
        self.stream = _flag(form, "stream")
        if self.stream and self._format not in ("json", "text"):
            raise refuse(f"response_format {self._format} cannot be streamed; json and text can", "stream")
        self._granularities = self._read_granularities(form, transcriber)
        self._options = transcriber.check(
            TranscriptionOptions(
                language=form.one("language") or None,
                task=task,
                prompt=form.one("prompt") or "",
                temperature=_number(form, "temperature", 0.0, 1.0),
                temperature_fallback=_flag(form, "temperature_fallback"),
                timestamps=self._format in TIMED,
                word_timestamps="word" in self._granularities,
                seed=_whole(form, "seed"),
            )
        )

    def _read_granularities(self, form: Form, transcriber: Transcriber) -> set[str]:
        names = ("timestamp_granularities[]", "timestamp_granularities")
        wanted = {value for name in names for value in form.fields.get(name, [])}
        for value in wanted:
            if value not in GRANULARITIES:
                raise refuse(f"{names[0]} must be one of {', '.join(GRANULARITIES)}, got {value!r:.40}", names[0])
            if self._format != "verbose_json":
                raise refuse(f"{names[0]} needs response_format=verbose_json", names[0])
        if "word" in wanted and not transcriber.hearing.aligns:
            raise refuse(
                f"this server shares its model among GPUs and cannot tell when words are spoken; {names[0]}=segment is "
                "told, and a server on one GPU tells both",
                names[0],
            )
        return wanted or {"segment"}

    async def _pieces(self, *, final: bool) -> AsyncGenerator[Piece, None]:
        pieces = transcribe(self._service.llm, self._transcriber, self.samples, self._options, final=final)
        with self._service.room(1, 1), self._hearing.hold(self.samples.nbytes):
            async with contextlib.aclosing(pieces) as found:
                async for piece in found:
                    yield piece

    async def whole(self) -> Response:
        """The answer in one piece."""
        segments: list[Segment] = []
        words: list[Word] = []
        texts, language, tokens = [], "", [0, 0]
        async for piece in self._pieces(final=True):
            segments += piece.segments
            words += piece.words
            texts.append(piece.text)
            language, tokens = piece.language, [a + b for a, b in zip(tokens, piece.num_tokens, strict=True)]
        log_usage(self._scope, tokens[0], tokens[1], "stop")
        text = "".join(texts).strip()
        if self._format == "srt":
            return PlainTextResponse(as_srt(segments))
        if self._format == "vtt":
            return PlainTextResponse(as_vtt(segments), media_type="text/vtt")
        if self._format == "text":
            return PlainTextResponse(text + "\n")
        body: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self._seconds)}}
        if self._format == "verbose_json":
            body |= {
                "task": self._task,
                "language": language,
                "duration": self._seconds,
            }
            if "word" in self._granularities:
                body["words"] = [_word(each) for each in words]
            if "segment" in self._granularities:
                body["segments"] = [_segment(each) for each in segments]
        return Response(encode(body), media_type="application/json")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it grows."""
        text, tokens = "", [0, 0]
        async for piece in self._pieces(final=False):
            tokens = [a + b for a, b in zip(tokens, piece.num_tokens, strict=True)]
            delta = piece.text if text else piece.text.lstrip()
            if delta:
                text += delta
                yield event({"type": "transcript.text.delta", "delta": delta})
        log_usage(self._scope, tokens[0], tokens[1], "stop")
        usage = {"type": "tokens", "input_tokens": tokens[0], "output_tokens": tokens[1], "total_tokens": sum(tokens)}
        yield event({"type": "transcript.text.done", "text": text, "usage": usage})

    @property
    def _seconds(self) -> float:
        return round(len(self.samples) / RATE, 3)


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.word, "start": round(word.start, 3), "end": round(word.end, 3)}


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": round(segment.start * 100),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _flag(form: Form, name: str) -> bool:
    value = (form.one(name) or "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise refuse(f"{name} must be true or false, got {value!r:.40}", name)
    return value in ("true", "1")


def _number(form: Form, name: str, low: float, high: float) -> float:
    given = form.one(name)
    try:
        value = float(given) if given else 0.0
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise refuse(f"{name} must be a number from {low:g} to {high:g}, got {given!r:.40}", name)
    return value


def _whole(form: Form, name: str) -> int | None:
    given = form.one(name)
    if not given:
        return None
    try:
        return int(given)
    except ValueError:
        raise refuse(f"{name} must be a whole number, got {given!r:.40}", name) from None
