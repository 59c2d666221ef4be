"""Decoders with sight on a GPU: the tokens of transformers on the CPU, without a host wait, beside rows that decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.core.config import Thresholds
from headway.engine.boot import build_engine
from tests.engine.harness import run
from tests.multimodal import test_engine, test_gemma3n, test_sounds
from tests.multimodal.test_engine import cache_rows
from tests.multimodal.tiny_sight import FAMILIES, arguments, hf_greedy, request, sighted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


HEARD = "gemma4 heard"
"""Gemma 4 with prompts that have recordings, too."""
HEARS = "gemma3n"
"""Without its tower that sees."""


def prompts(name: str) -> list[list[Any]]:
    if name == HEARS:
        return test_gemma3n.prompts()
    return test_sounds.prompts() if name == HEARD else test_engine.prompts(name)


@pytest.mark.parametrize("name", [*FAMILIES, HEARD, HEARS])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_those_of_transformers(name: str, eager: bool) -> None:
    """In float32; beside rows that decode a step does one block of the tower. Towers and steps with pictures replay graphs."""
    one = sighted(name.split()[0])
    options: dict[str, Any] = {
        "device": "cuda", "count_host_waits": True, "enforce_eager": eager, "block_size": 16, "encoder_step_ratio": 1e-9,
        "max_num_batched_tokens": 80 if name == "paligemma" else 48,
    }  # fmt: skip
    core = build_engine(
        arguments(one.folder, **options), progress=False, thresholds=Thresholds(encoder_cache_rows=cache_rows(name))
    )
    try:
        info = core.info.vision
        assert info is not None
        batch = [request(info, f"{i}", prompts(name)[(i + 2) % 5], max_tokens=8) for i in range(10)]
        answers = run(core, batch)
        waits = core.stats().host_waits
        passes = core._runner.executor.passes
        assert passes is not None and bool(passes.num_replays) == (not eager)
        core.check_integrity()
    finally:  # it counts host waits, and torch would go on to warn of those of other tests
        core.shutdown()
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts(name)[(i + 2) % 5], 8), i
    assert not any((waits or {}).values()), waits
