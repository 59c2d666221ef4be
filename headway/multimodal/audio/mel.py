"""Log-mel spectrograms as Whisper was trained on (Radford et al. 2022, 2.2): 25 ms windows every 10 ms."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.wav import Floats

WINDOW, HOP = 400, 160
"""Samples of a window, and from one to the next."""
FLOOR, RANGE = 1e-10, 8.0
"""Least power; and how far below the loudest a value may lie, in powers of ten."""


@lru_cache(maxsize=4)
def mel_filters(bins: int) -> Floats:
    """float32 [bins, WINDOW / 2 + 1]: triangles that are equally wide on Slaney's mel scale, each of area one."""
    top = RATE / 2
    places = np.linspace(0.0, _to_mel(np.array(top)), bins + 2)
    edges = _to_hertz(places)
    found = triangles(edges, np.linspace(0.0, top, WINDOW // 2 + 1))
    return (found * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)


def triangles(edges: npt.NDArray[np.float64], frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[E - 2, F]: how much each of F frequencies counts in a triangle of height one between edges i and i + 2."""
    slopes = edges[:, None] - frequencies[None, :]
    widths = np.diff(edges)
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    found: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return found


def _to_mel(hertz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    linear = 3.0 * hertz / 200.0
    return np.where(hertz >= 1000.0, 15.0 + np.log(np.maximum(hertz, 1.0) / 1000.0) * (27.0 / np.log(6.4)), linear)


def _to_hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mel >= 15.0, 1000.0 * np.exp((np.log(6.4) / 27.0) * (mel - 15.0)), 200.0 * mel / 3.0)


def log_mel(samples: Floats, *, bins: int, frames: int) -> Floats:
    """The spectrogram of one window of a recording, which silence fills up.

    Args:
        samples: float32 [n] at ``RATE``; those behind ``frames * HOP`` are not heard.

    Returns:
        float32 [bins, frames], contiguous.
    """
    length = frames * HOP
    padded = np.zeros(length, np.float32)
    kept = min(len(samples), length)
    padded[:kept] = samples[:kept]
    padded = np.pad(padded, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: frames * HOP : HOP]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
    power = np.abs(np.fft.rfft(windows * hann, axis=1)).astype(np.float32) ** 2
    found = np.log10(np.maximum(mel_filters(bins) @ power.T, FLOOR))
    found = np.maximum(found, found.max() - RANGE)
    return np.ascontiguousarray((found + 4.0) / 4.0, np.float32)
