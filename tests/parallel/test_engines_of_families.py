"""Models with encoders, and models that pool, on two ranks: the same answers as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.messages import AddRequest
from headway.core.task import Task
from headway.engine.boot import build_engine
from tests.engine import tiny_encoder_decoders, tiny_encoders
from tests.engine.harness import run
from tests.engine.tiny_encoder_decoders import START, reader, recording, save, text, whisper
from tests.multimodal import test_gemma3n, test_sounds, tiny_sight
from tests.multimodal.test_engine import info_of, prompts
from tests.multimodal.tiny_sight import FAMILIES, sighted
from tests.parallel.test_engine import HALVES, THREADS, compare

TP: dict[str, Any] = THREADS | {"tensor_parallel_size": 2, "run_ahead": 2}
WAYS: tuple[dict[str, Any], ...] = ({"run_ahead": 0}, TP, TP | HALVES, HALVES | {"run_ahead": 0})
"""One rank, two, and in halves: those of steps in which tokens see later ones are left whole."""


def asked(kind: str, item: int) -> AddRequest:
    media = recording(item) if kind == "whisper" else text([5 + item, 9, 7, 2])
    return tiny_encoder_decoders.request(f"{item}", media, [START, 5][: 1 + item % 2], max_tokens=6, logprobs=1)


@pytest.mark.parametrize("kind", ["whisper", "bart", "t5"])
def test_encoder_decoders(kind: str, tmp_path: Path) -> None:
    folder = save(whisper() if kind == "whisper" else reader(kind), tmp_path)
    found = []
    for more in WAYS:
        core = build_engine(tiny_encoder_decoders.arguments(folder, **more), progress=False)
        found.append(run(core, [asked(kind, item) for item in range(4)]))
        core.check_integrity()
        core.shutdown()
    for each in found[1:]:
        compare(each, found[0])


QUICK = ("gemma3", "qwen3", "smolvlm")


@pytest.mark.parametrize(
    "name", [*QUICK, *[pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES if name not in QUICK]]
)
def test_sight(name: str) -> None:
    folder, found = sighted(name).folder, []
    for more in WAYS:
        core = build_engine(tiny_sight.arguments(folder, **more), progress=False)
        info = info_of(core)
        made = [
            tiny_sight.request(info, f"{n}", parts, max_tokens=5, logprobs=1)
            for n, parts in enumerate(prompts(name)[:4])
        ]
        found.append(run(core, made))
        core.shutdown()
    for each in found[1:]:
        compare(each, found[0])


LATE = TP | HALVES | {"device": "sim:9"}


def test_halves_of_speech_on_the_simulated_device(tmp_path: Path) -> None:
    """Each rank has a device that runs late; a half reads what the encoder has made of the tokens that are its own."""
    folder, found = save(whisper(), tmp_path), []
    for more in ({"run_ahead": 0}, LATE):
        core = build_engine(tiny_encoder_decoders.arguments(folder, **more), progress=False)
        found.append(run(core, [asked("whisper", item) for item in range(3)]))
        core.shutdown()
    compare(found[1], found[0])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_hearing(name: str) -> None:
    """Recordings, in a model whose media have words of their own and in one that sees, too."""
    folder, found = sighted(name).folder, []
    spoken = test_gemma3n.prompts if name == "gemma3n" else test_sounds.prompts
    for more in WAYS:
        core = build_engine(tiny_sight.arguments(folder, **more), progress=False)
        info = info_of(core)
        made = [
            tiny_sight.request(info, f"{n}", parts, max_tokens=5, logprobs=1) for n, parts in enumerate(spoken()[:4])
        ]
        found.append(run(core, made))
        core.shutdown()
    for each in found[1:]:
        compare(each, found[0])


@pytest.mark.parametrize(
    ("name", "config"),
    [("BertModel", {}), ("Qwen3Model", {"num_key_value_heads": 2, "head_dim": 8, "num_attention_heads": 4})],
)
def test_pooling(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder, found = tiny_encoders.save(tiny_encoders.build(name, **config), tmp_path), []
    for more in ({}, TP):
        core = tiny_encoders.engine(folder, **more)
        found.append(tiny_encoders.pooled(core, tiny_encoders.texts(5, 12), Task.EMBED))
        core.shutdown()
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)
