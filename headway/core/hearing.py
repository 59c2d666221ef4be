"""What a model that hears says of itself, and the rules that its transcripts obey. Plain data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MAX_SUPPRESSED = 256
"""Tokens that may not be drawn, at the beginning or ever."""
SECONDS_PER_TIMESTAMP = 0.02


class SpeechRules(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """Tokens that a transcript may not have, and where; see ``kernels.speech_rules``.

    Attributes:
        suppress: never drawn.
        begin_suppress: not drawn first.
        first_timestamp: token that stands for 0 s; those from it on stand for later times. -1: there are no rules for times.
        end: the token that ends the text: of all below it, none may follow a single timestamp.
        max_initial: the first timestamp may be at most so many after 0 s; -1: any.
    """

    suppress: list[int] = []
    begin_suppress: list[int] = []
    first_timestamp: int = -1
    end: int = -1
    max_initial: int = -1


class Alignment(msgspec.Struct, kw_only=True, array_like=True, frozen=True):
    """It is wanted when the tokens of a prompt are heard (``attention.alignment``): such a prompt runs in one step.

    Attributes:
        first: tokens behind this one, up to the last, which ends the text, are wanted.
        frames: encoder outputs that are of the recording, and not of the silence behind it.
    """

    first: int
    frames: int


class AlignedRow(NamedTuple):
    """A row of a step whose tokens are placed in the recording.

    Attributes:
        slot: its own. begin, end: its tokens in the step.
        first, frames: see ``Alignment``.
    """

    slot: int
    begin: int
    end: int
    first: int
    frames: int

    @property
    def num_placed(self) -> int:
        """Tokens that are placed."""
        return self.end - self.begin - 1 - self.first


class HearingInfo(msgspec.Struct, kw_only=True, array_like=True):
    """What transcribing needs to know; fixed at start-up.

    Attributes:
        mel_bins, frames: of a spectrogram. outputs: of the encoder for it.
        start: token that every transcript begins behind. previous: what stands before text of earlier; -1: there is none.
        no_timestamps, first_timestamp: tokens; -1: the model knows no times.
        no_speech: token whose probability behind ``start`` says that nobody speaks; -1: unknown.
        languages: code -> token; empty for models of one language, which name neither language nor task.
        tasks: "transcribe", "translate" -> token.
        suppress, begin_suppress, max_initial: see ``SpeechRules``.
        aligns: requests may ask for an ``Alignment``.
    """

    mel_bins: int
    frames: int
    outputs: int
    start: int
    end: int
    previous: int = -1
    no_timestamps: int = -1
    first_timestamp: int = -1
    no_speech: int = -1
    languages: dict[str, int] = {}
    tasks: dict[str, int] = {}
    suppress: list[int] = []
    begin_suppress: list[int] = []
    max_initial: int = -1
    aligns: bool = False

    @property
    def window_seconds(self) -> float:
        """What a spectrogram is of."""
        return self.frames / 100

    def rules(self, *, timestamps: bool) -> SpeechRules:
        """Of a transcript."""
        return SpeechRules(
            suppress=sorted({*self.suppress, *([self.no_timestamps] if timestamps else [])}),
            begin_suppress=self.begin_suppress,
            first_timestamp=self.first_timestamp if timestamps else -1,
            end=self.end,
            max_initial=self.max_initial if timestamps else -1,
        )
