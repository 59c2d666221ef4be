"""Long recordings in windows: each as long as the encoder hears, cut where it is quietest."""

from __future__ import annotations

import numpy as np

from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.wav import Floats

SEARCHED_SECONDS = 5.0
"""A window ends where it is quietest in its last so many seconds."""
QUIET_SECONDS = 0.1
"""How long it must be quiet there."""


def cut(samples: Floats, window_seconds: float) -> list[tuple[int, int]]:
    """(first sample, end) of each window; one behind the other, none longer than ``window_seconds``."""
    most, start, found = int(window_seconds * RATE), 0, []
    while len(samples) - start > most:
        end = start + most
        first = end - int(min(SEARCHED_SECONDS, window_seconds / 2) * RATE)
        end = first + _quietest(samples[first:end])
        found.append((start, end))
        start = end
    return [*found, (start, len(samples))]


def _quietest(samples: Floats) -> int:
    """The middle of the quietest piece."""
    size = int(QUIET_SECONDS * RATE)
    power = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    sums = power[size:] - power[:-size]
    return int(np.argmin(sums)) + size // 2 if len(sums) else len(samples)
