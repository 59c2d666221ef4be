"""What transcribing gives, and the formats in which it can be written."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field


def compression(text: str) -> float:
    """How much shorter a text gets: high where it repeats itself; 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


@dataclass(slots=True)
class Segment:
    """A piece of a transcript.

    Attributes:
        start, end: seconds from the recording's beginning.
        tokens: of the text, without timestamps.
        avg_logprob: mean log-probability of the tokens, timestamps included, of the window that it is from.
        no_speech_prob: probability that nobody speaks in that window; None: nobody asked the model.
    """

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    no_speech_prob: float | None = None

    @property
    def compression_ratio(self) -> float:
        """How much shorter the text gets: high where it repeats itself."""
        return compression(self.text)


@dataclass(slots=True)
class Word:
    """A word and the punctuation that touches it; ``start``, ``end``: seconds from the recording's beginning."""

    word: str
    start: float
    end: float


@dataclass(slots=True)
class Transcript:
    """Of one recording.

    Attributes:
        language: its code.
        duration: seconds.
        segments: in order; one for each window where no timestamps were asked for.
        words: in order; None: nobody asked for them.
    """

    text: str
    language: str
    duration: float
    segments: list[Segment] = field(default_factory=list)
    words: list[Word] | None = None


def as_srt(segments: list[Segment]) -> str:
    """SubRip."""
    blocks = [
        f"{i}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each.text)}\n"
        for i, each in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(segments: list[Segment]) -> str:
    """WebVTT."""
    blocks = [f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each.text)}\n" for each in segments]
    return "\n".join(["WEBVTT\n", *blocks])


def _line(text: str) -> str:
    """No line of a subtitle may be empty or look like a time."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    minutes, left = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{left // 1000:02}{point}{left % 1000:03}"
