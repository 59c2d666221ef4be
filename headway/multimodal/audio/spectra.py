"""Log-mel spectra of recordings in prompts, as towers of the Universal Speech Model read them (Zhang et al. 2023)."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.ints import cdiv, next_power_of_2
from headway.multimodal.audio.decode import RATE
from headway.multimodal.audio.mel import triangles
from headway.multimodal.audio.wav import Floats


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
        floor: added to what the logarithm is of; or the least that it is, with ``clamps``.
        clamps: see ``floor``.
        multiple: silence behind makes samples a multiple of so many, and is heard; 0: none does.
        centred: the first window is around the first sample; else it begins there.
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
    clamps: bool = False
    multiple: int = 0
    centred: bool = True
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @property
    def ahead(self) -> int:
        """Samples of silence before the first."""
        return self.window // 2 if self.centred else 0

    def frames(self, samples: int) -> int:
        """Spectra of so many samples; a window and its next sample lie within them, and what silence is heard."""
        whole = cdiv(samples, self.multiple) * self.multiple if self.multiple else samples
        return max(cdiv(whole + self.ahead - self.window, self.hop), 0)

    def most_samples(self, frames: int) -> int:
        """Samples that come to so many spectra and no more."""
        most = frames * self.hop + self.window - self.ahead
        return most // self.multiple * self.multiple if self.multiple else most


def spectra(samples: Floats, settings: MelSettings) -> Floats:
    """float32 [n] at ``RATE`` -> float32 [settings.frames(n), bins]; the logarithm in float64."""
    count, size = settings.frames(len(samples)), settings.window
    if not count:
        return np.empty((0, settings.bins), np.float32)
    behind = -len(samples) % settings.multiple if settings.multiple else 0
    padded = np.pad(samples * np.float32(settings.scale), (settings.ahead, behind))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size + 1)[: count * settings.hop : settings.hop]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)
    length = next_power_of_2(size) * (2 if settings.doubled else 1)
    power = np.abs(np.fft.rfft(_emphasised(windows, settings) * hann, n=length, axis=1))
    power = power @ _filters(settings, length).T
    found = np.log(np.maximum(power, settings.floor) if settings.clamps else power + settings.floor)
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
