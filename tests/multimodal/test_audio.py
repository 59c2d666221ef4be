"""Recordings: spectrograms are those of transformers, files are read as they were written, and hostile ones are refused."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest

from headway.multimodal.audio.decode import RATE, check_samples, decode_audio
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.mel import log_mel, mel_filters
from headway.multimodal.audio.resample import resample

MOST = 40.0


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> Any:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A PCM file, by the standard library."""
    buffer = io.BytesIO()
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
    raw = scaled.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    if width == 1:
        raw = (scaled + 128).astype(np.uint8).tobytes()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return buffer.getvalue()


def chunks(*parts: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in parts)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def form(tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, more: bytes = b"") -> tuple[bytes, bytes]:
    frame = channels * bits // 8 % 2**16
    return b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * frame % 2**32, frame, bits) + more


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.02, 3.7, 30.0, 34.0])
def test_spectrograms_are_those_of_transformers(bins: int, seconds: float) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=bins)
    samples = tone(seconds) + np.random.default_rng(3).standard_normal(int(seconds * RATE)).astype(np.float32) * 0.1
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(mel_filters(bins), extractor.mel_filters.T, atol=1e-6)
    np.testing.assert_allclose(log_mel(samples, bins=bins, frames=3000), expected, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_every_width(width: int) -> None:
    samples = tone(0.3)
    found = decode_audio(wav(samples, width=width), most_seconds=MOST)
    np.testing.assert_allclose(found, samples, atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_channels_are_mixed_and_other_forms_read() -> None:
    left, right = tone(0.1), tone(0.1, hertz=900.0)
    both = np.stack([left, right], 1)
    np.testing.assert_allclose(decode_audio(wav(both.ravel(), channels=2), most_seconds=MOST), both.mean(1), atol=1e-4)
    floats = chunks((b"LIST", b"odd"), form(3, bits=32), (b"data", left.tobytes()))
    np.testing.assert_array_equal(decode_audio(floats, most_seconds=MOST), left)
    extensible = form(0xFFFE, bits=32, more=struct.pack("<HHIH", 22, 32, 0, 3) + b"\0" * 14)
    np.testing.assert_array_equal(decode_audio(chunks(extensible, (b"data", left.tobytes())), most_seconds=MOST), left)
    endless = bytearray(wav(left))
    endless[40:44] = b"\xff" * 4  # as programs write that stream
    assert len(decode_audio(bytes(endless), most_seconds=MOST)) == len(left)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101])
def test_other_rates_keep_what_is_heard(rate: int) -> None:
    found = decode_audio(wav(tone(1.0, rate), rate), most_seconds=MOST)
    assert abs(len(found) - RATE) <= 1
    np.testing.assert_allclose(found[200:-200], tone(1.0)[: len(found)][200:-200], atol=2e-3)


def test_what_is_too_high_is_not_heard_lower() -> None:
    found = resample(tone(0.5, 48000, 11000.0), 48000, RATE)
    assert np.abs(found[300:-300]).max() < 1e-3


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "a text": b"hello, this is no recording" * 10,
    "zeros": bytes(5000),
    "only a header": b"RIFF\0\0\0\0WAVE",
    "no samples": chunks(form()),
    "samples of no frames": chunks(form(), (b"data", b"")),
    "samples first": chunks((b"data", bytes(100)), form()),
    "format cut off": chunks((b"fmt ", b"\1\0\1\0")),
    "no channels": chunks(form(channels=0), (b"data", bytes(100))),
    "many channels": chunks(form(channels=60000), (b"data", bytes(10**6))),
    "no rate": chunks(form(rate=0), (b"data", bytes(100))),
    "a rate beyond all": chunks(form(rate=2**32 - 1), (b"data", bytes(100))),
    "odd bits": chunks(form(bits=13), (b"data", bytes(100))),
    "compressed WAV": chunks(form(tag=85, bits=0), (b"data", bytes(100))),
    "no numbers": chunks(form(3, bits=32), (b"data", np.full(500, np.nan, np.float32).tobytes())),
    "infinite": chunks(form(3, bits=32), (b"data", np.full(500, np.inf, np.float32).tobytes())),
    "too long": wav(np.zeros(int(MOST * 1000) + 1000), 1000),
    "chunks without end": b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 5000,
    "a chunk beyond the end": b"RIFF\0\0\0\0WAVE" + b"junk\xff\xff\xff\x7f" + bytes(50),
    "a flac cut off": b"fLaC\0\0\0\x22" + bytes(20),
    "an ogg of nothing": b"OggS" + bytes(60),
    "an mp3 of noise": b"ID3\4\0\0\0\0\0\0" + bytes(range(256)) * 8,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(300),
    "a program": b"\x7fELF" + bytes(300),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str) -> None:
    with pytest.raises(AudioError):
        decode_audio(HOSTILE[kind], most_seconds=MOST)


def test_a_file_that_is_cut_off_anywhere_is_read_or_refused() -> None:
    whole = wav(tone(0.01))
    for end in range(len(whole)):
        try:
            found = decode_audio(whole[:end], most_seconds=MOST)
        except AudioError:
            continue
        assert len(found) == (end - 44) // 2


def test_flac_and_ogg_are_read_and_bombs_are_not() -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = tone(1.0, 44100)
    for kind in ("FLAC", "OGG", "MP3"):
        buffer = io.BytesIO()
        soundfile.write(buffer, samples, 44100, format=kind)
        found = decode_audio(buffer.getvalue(), most_seconds=MOST)
        np.testing.assert_allclose(found[2000:14000], tone(1.0)[2000:14000], atol=0.05)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(48000 * 600, np.float32), 48000, format="FLAC")
    assert len(buffer.getvalue()) < 10**6
    with pytest.raises(AudioError, match="600 s"):
        decode_audio(buffer.getvalue(), most_seconds=MOST)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [([], 16000), ("text", 16000), (np.zeros((2, 2, 2)), 16000), (np.zeros(9), 0), (np.zeros(9), 16000.5),
     (np.zeros(9), True), (np.zeros(9, complex), 16000), (np.full(9, np.nan), 16000), (np.zeros(10**6), 16000)],
)  # fmt: skip
def test_arrays_that_are_no_recordings_are_refused(samples: Any, rate: Any) -> None:
    with pytest.raises(AudioError):
        check_samples(samples, rate, most_seconds=MOST)


def test_arrays_are_taken_in_any_form() -> None:
    samples = tone(0.1)
    for given in (samples, samples.astype(np.float64), np.stack([samples] * 2), np.stack([samples] * 2, 1)):
        np.testing.assert_allclose(check_samples(given, RATE, most_seconds=MOST), samples, atol=1e-6)
    np.testing.assert_allclose(
        check_samples((samples * 32767).astype(np.int16), RATE, most_seconds=MOST), samples, atol=1e-4
    )
