"""When words are spoken, on a real GPU: frames are those of transformers, beside rows that decode, and no step waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.engine.boot import build_engine
from headway.kernels.time_warp import time_warp
from tests.engine.harness import run
from tests.engine.test_alignment import HEADS, check, mixed
from tests.engine.tiny_encoder_decoders import arguments, save, whisper
from tests.gpu.guard import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 2])
def test_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, eager: bool) -> None:
    model = whisper()
    model.generation_config.alignment_heads = HEADS
    more: dict[str, Any] = {"device": "cuda", "run_ahead": depth, "enforce_eager": eager, "max_num_batched_tokens": 18}
    core = build_engine(arguments(save(model, tmp_path), **more), progress=False)
    model.set_attn_implementation("eager")
    batch, numbers = mixed()
    with no_waits(monkeypatch) as launches:
        answers = run(core, batch)
    assert launches[0] == core.stats().num_steps
    check(model, batch, numbers, answers)
    core.shutdown()


@pytest.mark.parametrize("size", [(447, 1500), (1, 1500), (200, 700), (447, 3)], ids=str)
def test_the_way_through_a_whole_window(size: tuple[int, int]) -> None:
    """Of the largest text there is, by sums of whole numbers, whose order does not matter."""
    costs = torch.randint(-9, 10, size, generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(time_warp(costs.cuda()).cpu(), time_warp(costs))
