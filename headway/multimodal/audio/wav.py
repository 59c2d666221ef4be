"""RIFF/WAVE, the one container that is decoded without a library: linear PCM of 8 to 32 bits, and IEEE floats."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.multimodal.audio.errors import AudioError

Floats = npt.NDArray[np.float32]
PCM, IEEE_FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MOST_CHUNKS = 1000
"""Chunks ahead of the samples; more than a few are nobody's honest file."""
_WIDTHS: Final = {(PCM, 8): 1, (PCM, 16): 2, (PCM, 24): 3, (PCM, 32): 4, (IEEE_FLOAT, 32): 4, (IEEE_FLOAT, 64): 8}


class Format(NamedTuple):
    """What a file's samples are."""

    tag: int
    channels: int
    rate: int
    bits: int


def is_wav(data: bytes) -> bool:
    """Whether ``data`` says that it is such a file."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def read_wav(data: bytes, most_samples: int) -> tuple[Floats, int]:
    """Samples float32 [n], the mean of all channels, in [-1, 1]; and their rate.

    Sizes in the file are believed only as far as there are bytes: writers that stream leave them at their greatest.

    Raises:
        AudioError: it is no such file, it is cut off ahead of its samples, or it is longer than ``most_samples``.
    """
    found, place = None, 12
    for _ in range(MOST_CHUNKS):
        if place + 8 > len(data):
            break
        name, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        place += 8
        if name == b"fmt ":
            found = _read_format(data[place : place + min(size, 40)])
        elif name == b"data":
            if found is None:
                raise AudioError("the WAV file has samples ahead of their format")
            return _samples(data[place : place + size], found, most_samples), found.rate
        place += size + size % 2
    raise AudioError("the WAV file has no samples: it is empty or cut off")


def _read_format(chunk: bytes) -> Format:
    if len(chunk) < 16:
        raise AudioError("the WAV file's format is cut off")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == EXTENSIBLE and len(chunk) >= 26:
        tag = struct.unpack_from("<H", chunk, 24)[0]
    if (tag, bits) not in _WIDTHS:
        raise AudioError(f"WAV of format {tag} with {bits} bits is not supported; PCM of 8 to 32 bits and floats are")
    return Format(tag, channels, rate, bits)


def _samples(data: bytes, form: Format, most: int) -> Floats:
    width = _WIDTHS[form.tag, form.bits]
    frame = width * form.channels
    check_shape(form.channels, form.rate)
    number = len(data) // frame
    if number > most:
        raise AudioError(f"the recording has {number} samples a channel; at most {most} are possible")
    raw = data[: number * frame]
    values: npt.NDArray[Any]
    if form.tag == IEEE_FLOAT:
        values = np.frombuffer(raw, f"<f{width}").astype(np.float32)
    elif width == 3:
        wide = np.zeros((number * form.channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    elif width == 1:
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    else:
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return mono(values.reshape(number, form.channels))


MOST_CHANNELS, LEAST_RATE, MOST_RATE = 32, 1000, 384_000


def check_shape(channels: int, rate: int) -> None:
    """Raises AudioError: no recording has so many channels, or such a rate."""
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(f"the recording has {channels} channels; 1 to {MOST_CHANNELS} are possible")
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise AudioError(f"the recording has {rate} samples a second; {LEAST_RATE} to {MOST_RATE} are possible")


def mono(samples: npt.NDArray[Any]) -> Floats:
    """[n, channels] -> float32 [n], their mean.

    Raises:
        AudioError: a sample is no finite number.
    """
    mixed = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    mixed = np.ascontiguousarray(mixed, np.float32)
    if not np.isfinite(mixed).all():
        raise AudioError("the recording has samples that are no numbers")
    return np.clip(mixed, -1e3, 1e3)
