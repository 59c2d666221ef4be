"""What of a transcript is told: seconds to the millisecond, in each of its parts."""

from __future__ import annotations

from headway.api.hearing.transcript import Segment, Word
from headway.server.hearing.routes import _segment, _word


def test_times_are_told_to_the_millisecond() -> None:
    assert _word(Word("a", 0.12345, 1.98765)) == {"word": "a", "start": 0.123, "end": 1.988}
    told = _segment(Segment(3, 0.12345, 1.98765, " a", [7], 0.25, -0.123456, 0.0123456))
    assert told == {
        "id": 3, "seek": 12, "start": 0.123, "end": 1.988, "text": " a", "tokens": [7], "temperature": 0.25,
        "avg_logprob": -0.123456, "compression_ratio": 2 / 10, "no_speech_prob": 0.0123456,
    }  # fmt: skip
