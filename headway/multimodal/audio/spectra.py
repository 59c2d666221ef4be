"""Log-mel spectra of recordings in prompts, as towers of the Universal Speech Model read them (Zhang et al. 2023)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.ints import cdiv, next_power_of_2
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.mel import triangles
from headway.multimodal.audio.wav import Floats

MOST_BINS: Final = 1024


class MelSettings(msgspec.Struct, kw_only=True, frozen=True):
    """How a model's spectra are made.

    Attributes:
        bins: numbers of a spectrum.
        window, hop: samples of a spectrum, and from one to the next.
        lowest, highest: frequencies in Hz that bins lie between.
        emphasis: so much of each sample's predecessor is taken off it; 0: nothing.
        keeps_first: the first sample of a window has no predecessor, and is made smaller; else it has the one before.
        doubled: spectra are twice as fine as the window needs.
        scale: of samples.
        floor: added to what the logarithm is of.
        mean, deviation: of each bin, to normalise by; (): not.
    """

    bins: int = 128
    window: int = 320
    hop: int = 160
    lowest: float = 0.0
    highest: float = 8000.0
    emphasis: float = 0.0
    keeps_first: bool = True
    doubled: bool = False
    scale: float = 1.0
    floor: float = 1e-3
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def frames(self, samples: int) -> int:
        """Spectra of so many samples: the first is around the first sample, and none goes beyond the last."""
        return max(cdiv(samples - (self.window - self.window // 2), self.hop), 0)


def spectra(samples: Floats, settings: MelSettings) -> Floats:
    """float32 [n] at ``RATE`` -> float32 [settings.frames(n), bins]; the logarithm in float64."""
    count, size = settings.frames(len(samples)), settings.window
    if not count:
        return np.empty((0, settings.bins), np.float32)
    padded = np.pad(samples * np.float32(settings.scale), (size // 2, 0))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size + 1)[: count * settings.hop : settings.hop]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)
    length = next_power_of_2(size) * (2 if settings.doubled else 1)
    power = np.abs(np.fft.rfft(_emphasised(windows, settings) * hann, n=length, axis=1))
    found = np.log(power @ _filters(settings, length).T + settings.floor)
    if settings.mean:
        found = found - np.array(settings.mean)
    if settings.deviation:
        found = found / np.array(settings.deviation)
    return np.ascontiguousarray(found, np.float32)


def _emphasised(windows: Floats, settings: MelSettings) -> Floats:
    """[n, window + 1] -> [n, window]."""
    share = np.float32(settings.emphasis)
    if not share:
        return windows[:, :-1]
    if not settings.keeps_first:
        return windows[:, 1:] - share * windows[:, :-1]
    return np.concatenate([windows[:, :1] * (1 - share), windows[:, 1:-1] - share * windows[:, :-2]], axis=1)


@lru_cache(maxsize=4)
def _filters(settings: MelSettings, length: int) -> npt.NDArray[np.float64]:
    """[bins, length / 2 + 1]: triangles that are equally wide on the mel scale of the Hidden Markov Model Toolkit."""
    first, last = (2595.0 * np.log10(1.0 + each / 700.0) for each in (settings.lowest, settings.highest))
    edges = 700.0 * (10.0 ** (np.linspace(first, last, settings.bins + 2) / 2595.0) - 1.0)
    return triangles(edges, np.linspace(0.0, RATE // 2, length // 2 + 1))
