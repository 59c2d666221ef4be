"""Pooling on a real GPU: adapters by task and heads for tokens as on the CPU, from graphs and without, and no step waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.task import Task
from tests.engine.tiny_encoders import build, engine, hidden_states, message, run, save, texts
from tests.gpu.guard import no_waits
from tests.models.test_adapters import WHOLE, jina
from tests.models.test_token_heads import bge

__all__ = ["bge", "jina"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [0, 2])
def test_adapters(jina: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, depth: int, eager: bool) -> None:
    folder, models = jina
    batch = texts(40, 40)
    requests = [message(str(i), ids, Task.TOKEN_EMBED, adapter=i % 4) for i, ids in enumerate(batch)]
    own: dict[str, Any] = {"pooler_config": WHOLE, "max_model_len": 40, "run_ahead": depth, "enforce_eager": eager}
    core = engine(folder, device="cuda", **own)
    with no_waits(monkeypatch) as launches:
        found = run(core, requests)
    assert launches[0] == core.stats().num_steps and (core.stats().num_graph_steps > 0) != eager
    for i, ids in enumerate(batch):
        expected = hidden_states(models[i % 4], ids)
        torch.testing.assert_close(torch.tensor(found[str(i)]).view(expected.shape), expected, atol=2e-3, rtol=2e-3)
    core.shutdown()


def test_heads_for_tokens_and_albert(bge: tuple[Any, Path, Any], tmp_path: Path) -> None:
    """As on the CPU, which other tests compare with transformers."""
    kinds = (Task.EMBED, Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)
    albert = save(build("AlbertModel", embedding_size=16, num_hidden_layers=5, num_hidden_groups=2), tmp_path)
    for folder, tasks in ((str(bge[1]), kinds), (albert, kinds[:1])):
        found = []
        for device in ("cpu", "cuda"):
            core = engine(folder, device=device, max_model_len=30)
            batch = [message(str(i), ids, tasks[i % len(tasks)]) for i, ids in enumerate(texts(20, 30))]
            found.append(run(core, batch))
            core.shutdown()
        for name, vector in found[0].items():
            torch.testing.assert_close(torch.tensor(vector), torch.tensor(found[1][name]), atol=2e-3, rtol=2e-3)
