"""Encoder-decoders on a real GPU: tokens are those of transformers on the CPU, from graphs and without, and no step waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.engine.boot import build_engine
from tests.engine.harness import run
from tests.engine.test_encoder_decoders import PROMPTS, TEXTS, heard
from tests.engine.tiny_encoder_decoders import arguments, greedy, reader, recording, request, save, text, whisper
from tests.gpu.guard import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 2])
def test_what_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, eager: bool) -> None:
    model = whisper()
    more: dict[str, Any] = {"device": "cuda", "run_ahead": depth, "enforce_eager": eager, "max_num_batched_tokens": 16}
    core = build_engine(arguments(save(model, tmp_path), **more), progress=False)
    batch = [request(f"{i}", recording(i % 3), PROMPTS[i % 5], max_tokens=12 + i) for i in range(8)]
    with no_waits(monkeypatch) as launches:
        answers = run(core, batch)
    assert launches[0] == core.stats().num_steps and (core.stats().num_graph_steps > 0) != eager
    for i in range(8):
        assert answers[f"{i}"].token_ids == heard(model, i % 3, PROMPTS[i % 5], 12 + i), i
    core.shutdown()


@pytest.mark.parametrize("kind", ["bart", "t5", "flan-t5"])
def test_what_is_read(tmp_path: Path, kind: str) -> None:
    model = reader(kind)
    core = build_engine(arguments(save(model, tmp_path), device="cuda"), progress=False)
    answers = run(core, [request(f"{i}", text(TEXTS[i % 5]), PROMPTS[i % 5]) for i in range(8)])
    for i in range(8):
        expected = greedy(model, {"input_ids": torch.tensor([TEXTS[i % 5]])}, PROMPTS[i % 5], 12)
        assert answers[f"{i}"].token_ids == expected, i
    core.shutdown()
