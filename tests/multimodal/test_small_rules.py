"""Rules of pictures and recordings that no model's numbers show: tables of places, sizes at their bounds, files that a library
decodes (which need not be here), sizes of prompts."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headway.api.pictures.prompts import image_bytes
from headway.api.pictures.sounds import Sound
from headway.multimodal.audio import decode
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.layout import _nearest
from headway.multimodal.process import _to_longest


@pytest.mark.parametrize(("count", "side"), [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (9, 14), (27, 14), (70, 32)])
def test_rows_take_the_nearest_of_a_table(count: int, side: int) -> None:
    """Row i of n takes row floor(i * side / n), exactly: in fractions, not in float32."""
    found = _nearest(count, side)
    assert found.dtype == np.int32 and found.tolist() == [i * side // count for i in range(count)]


@pytest.mark.parametrize(
    ("size", "longest", "found"),
    [
        ((10, 20), 8, (4, 8)),
        ((20, 10), 8, (8, 4)),
        ((10, 10), 8, (8, 8)),
        ((5, 40), 8, (2, 8)),
        ((40, 5), 8, (8, 2)),
        ((1, 100), 8, (1, 8)),
        ((100, 1), 8, (8, 1)),
        ((10, 20), 8192, (2048, 4096)),
        ((20, 10), 8192, (4096, 2048)),
        ((10, 20), 4096, (2048, 4096)),
        ((10, 30), 10, (4, 10)),
    ],
)
def test_the_longer_side_and_the_other(size: tuple[int, int], longest: int, found: tuple[int, int]) -> None:
    """(height, width): the other side even, unless it would be none, and nothing beyond 4096."""
    assert _to_longest(*size, longest) == found


class File:
    """A recording of a library's: so many frames, of which it says that there are ``frames``."""

    made: Any = None

    def __init__(self, source: Any) -> None:
        self.samplerate, self.channels, self.frames, self.left = File.made(source.read())
        self.is_closed = False

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def read(self, frames: int, dtype: str, always_2d: bool) -> Any:
        assert dtype == "float32" and always_2d
        count = min(frames, self.left)
        self.left -= count
        return np.tile(np.arange(self.channels, dtype=np.float32), (count, 1))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("soundfile")
    module.SoundFile = File
    module.SoundFileError = type("SoundFileError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "soundfile", module)


@pytest.mark.usefixtures("library")
def test_files_that_a_library_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PIECE", 1000)
    File.made = lambda data: (16_000, 2, 16_000, 16_000) if data == b"OggS" else None
    found = decode.decode_audio(b"OggS", most_seconds=1.0)
    assert found.shape == (16_000,) and np.allclose(found, 0.5), "the mean of its channels"
    File.made = lambda _: (8_000, 1, 4_000, 4_000)
    assert decode.decode_audio(b"fLaC", most_seconds=1.0).shape == (8_000,), (
        "twice as many, at the rate that models hear"
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("said", "holds", "seconds", "text"),
    [
        (16_001, 16_001, 1.0, "lasts 1 s; at most 1 s"),
        (0, 17_000, 1.0, "lasts 1 s; at most 1 s"),
        (2**62, 33_000, 1.0, "lasts 1 s; at most 1 s"),
        (48_000, 48_000, 2.0, "lasts 3 s; at most 2 s"),
        (0, 0, 1.0, "the recording has no samples"),
    ],
)
def test_files_that_are_too_long(
    said: int, holds: int, seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the file says, before it is read; where it says nothing, or lies, by what comes, and no further than needed."""
    monkeypatch.setattr(decode, "PIECE", 1000)
    read = 0
    whole = File.read

    def counted(self: File, *arguments: Any, **more: Any) -> Any:
        nonlocal read
        found = whole(self, *arguments, **more)
        read += len(found)
        return found

    monkeypatch.setattr(File, "read", counted)
    File.made = lambda _: (16_000, 1, said, holds)
    with pytest.raises(AudioError, match=text):
        decode.decode_audio(b"OggS", most_seconds=seconds)
    assert read == (0 if seconds * 16_000 < said < 2**62 else min(holds, 17_000))


@pytest.mark.usefixtures("library")
def test_files_that_a_library_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [sys.modules["soundfile"].SoundFileError, RuntimeError, ValueError, TypeError]
    for error in errors:

        def broken(_: bytes, error: Any = error) -> None:
            raise error("secret")

        File.made = broken
        with pytest.raises(AudioError, match="not a recording that can be read"):
            decode.decode_audio(b"OggS", most_seconds=1.0)
    File.made = lambda _: (16_000, 99, 10, 10)
    with pytest.raises(AudioError, match="channels"):
        decode.decode_audio(b"OggS", most_seconds=1.0)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(AudioError, match=r"pip install 'headway\[audio\]'"):
        decode.decode_audio(b"OggS", most_seconds=1.0)


def test_how_large_prompts_are() -> None:
    """Files by their bytes, other things by a guess: a mebibyte an image or a recording, and 64 for a video."""
    guess = 2**20

    def of(**data: Any) -> int:
        return image_bytes({"multi_modal_data": data})

    assert image_bytes({"multi_modal_data": 3}) == guess
    assert of(image=b"abc") == 3 and of(image=[b"abc", b"de"]) == 5 and of(image=(b"abc", object())) == 3 + guess
    assert of(image=object()) == guess and of(video=object(), image=b"abc") == 2**26 + 3
    assert of(image=b"abc", audio=b"defg") == 7 and of(image=b"", audio=[b"de", object()]) == 2 + guess
    assert of(image=b"", audio=Sound(b"abcd")) == 4
