"""Bytes of a file to samples. WAV needs no library; FLAC, MP3, OGG and others need soundfile (libsndfile), the extra ``audio``.

Call it where it may be killed: what a library does with hostile bytes is not ours to promise.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.resample import resample
from headway.multimodal.audio.wav import Floats, check_shape, is_wav, mono, read_wav

RATE = 16_000
"""Samples a second that models hear."""
PIECE = 2**18
"""Frames that are decoded at once: a file that says less than it holds is found out early."""


def decode_audio(data: bytes, *, most_seconds: float) -> Floats:
    """Samples float32 [n] at ``RATE``, one channel.

    Args:
        data: a file's bytes.
        most_seconds: longer recordings are refused, before they are decoded where the file says how long it is.

    Raises:
        AudioError: nothing can be made of it.
    """
    if not data:
        raise AudioError("the file is empty")
    samples, rate = _read(data, most_seconds)
    seconds = len(samples) / rate
    if seconds > most_seconds:
        raise AudioError(f"the recording lasts {seconds:.0f} s; at most {most_seconds:.0f} s are possible")
    if not len(samples):
        raise AudioError("the recording has no samples")
    return resample(samples, rate, RATE)


def check_samples(samples: object, rate: object, *, most_seconds: float) -> Floats:
    """An array that a caller brings, at ``RATE``.

    Args:
        samples: [n], or [channels, n] or [n, channels] of few channels; floats in [-1, 1] or integers.

    Raises:
        AudioError: it is none.
    """
    try:
        found = np.asarray(samples)
    except ValueError:  # lists of unequal lengths
        raise AudioError("audio must be an array of numbers [n]; its rows are not equally long") from None
    if found.dtype.kind not in "fiu" or found.ndim not in (1, 2) or not found.size:
        raise AudioError(f"audio must be an array of numbers [n], got {found.dtype} {list(found.shape)}")
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise AudioError(f"the sampling rate must be a whole number, got {rate!r:.40}")
    if found.dtype.kind in "iu":
        span = float(np.iinfo(found.dtype).max) + 1
        found = found.astype(np.float32) / span if found.dtype.kind == "i" else found.astype(np.float32) * 2 / span - 1
    if found.ndim == 1:
        found = found[:, None]
    elif found.shape[0] < found.shape[1]:
        found = found.T
    check_shape(found.shape[1], int(rate))
    if len(found) > most_seconds * int(rate):
        raise AudioError(
            f"the recording lasts {len(found) / int(rate):.0f} s; at most {most_seconds:.0f} s are possible"
        )
    return resample(mono(found.astype(np.float32)), int(rate), RATE)


def _read(data: bytes, most_seconds: float) -> tuple[Floats, int]:
    if is_wav(data):
        # What the file may hold follows from its rate, which only its header says: the highest bounds them all.
        samples, rate = read_wav(data, len(data))
        return samples, rate
    try:
        import soundfile
    except (ImportError, OSError):
        raise AudioError(
            "the file is not a WAV file; for FLAC, MP3 and OGG the server needs soundfile: pip install 'headway[audio]'"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _read_pieces(file, most_seconds)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, AudioError):
            raise
        raise AudioError("the file is not a recording that can be read (WAV, FLAC, MP3 and OGG can)") from None


def _read_pieces(file: Any, most_seconds: float) -> tuple[Floats, int]:
    rate, channels = int(file.samplerate), int(file.channels)
    check_shape(channels, rate)
    most = int(most_seconds * rate)
    if 0 <= most < file.frames < 2**62:
        raise AudioError(f"the recording lasts {file.frames / rate:.0f} s; at most {most_seconds:.0f} s are possible")
    pieces, number = [], 0
    while number <= most:
        piece = file.read(PIECE, dtype="float32", always_2d=True)
        if not len(piece):
            break
        pieces.append(mono(piece))
        number += len(piece)
    return (np.concatenate(pieces) if pieces else np.empty(0, np.float32)), rate
