"""Another sampling rate: band-limited interpolation by a windowed sinc (Smith and Gossett 1984), phase by phase."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
ZERO_CROSSINGS = 24
"""Of the sinc on either side of its middle."""
BETA, ROLLOFF = 12.0, 0.945
"""Of the Kaiser window; and the share of the band that is kept, which leaves the filter room to fall."""


def resample(samples: Floats, rate: int, wanted: int) -> Floats:
    """float32 [n] at ``rate`` -> float32 [ceil(n * wanted / rate)] at ``wanted`` samples a second."""
    if rate == wanted or not len(samples):
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cutoff = ROLLOFF * min(1.0, wanted / rate)
    reach = math.ceil(ZERO_CROSSINGS / cutoff)
    number = -(-len(samples) * up // down)
    padded = np.pad(samples, (reach, reach + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.empty(number, np.float32)
    offsets = np.arange(-reach, reach + 1)
    for phase in range(min(up, number)):
        first, part = divmod(phase * down, up)  # the phase's first output lies at first + part / up
        count = len(range(phase, number, up))
        weights = _filter(part / up - offsets, cutoff, reach)
        out[phase::up] = windows[first : first + (count - 1) * down + 1 : down] @ weights
    return out


def _filter(distance: npt.NDArray[np.floating], cutoff: float, reach: int) -> Floats:
    """Weights of samples at these distances."""
    inside = np.clip(1 - (distance / (reach + 1)) ** 2, 0, None)
    window = np.i0(BETA * np.sqrt(inside)) / np.i0(BETA)
    found: Floats = (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32)
    return found
