"""Decoders with sight on the simulated device: no host waits, no races, and the tokens of transformers, at every depth."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from headway.core.config import EngineArgs, Thresholds
from headway.core.encode import BlockCost, Encoding
from headway.engine.core import EngineCore
from tests.engine.harness import run
from tests.multimodal.test_engine import prompts
from tests.multimodal.tiny_sight import arguments, hf_greedy, request, sighted
from tests.sim.harness import simulated


@pytest.mark.parametrize(
    ("name", "depth", "seed"),
    [
        ("gemma3", 4, 2), ("qwen2.5", 2, 3), ("qwen3", 4, 4), ("paligemma", 2, 5), ("llava", 0, 6), ("smolvlm", 1, 7),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(name: str, depth: int, seed: int) -> None:
    """Requests arrive in two waves, on few blocks and few rows of the encoder cache, so that they preempt and evict. Beside rows
    that decode a step does one block of the tower; blocks are replayed as graphs."""
    one = sighted(name)
    options: dict[str, Any] = vars_of(
        arguments(
            one.folder, run_ahead=depth, max_num_seqs=3, max_num_batched_tokens=96 if name == "paligemma" else 28,
            encoder_step_ratio=1e-9, kv_cache_memory_bytes=26 * 8 * 2 * 2 * 2 * 8 * 4, max_model_len=120,
        )
    )  # fmt: skip
    small = Thresholds(encoder_cache_rows=48, encoder_rows=32)
    with simulated(seed, **options, thresholds=small) as (core, _, watch):
        info = core.info.vision
        assert info is not None
        batch = [request(info, f"{i}", prompts(name)[i % 5], max_tokens=10 + i % 4) for i in range(7)]
        passes = core._runner.executor.passes
        assert passes is not None
        encodings, run_pass = list[Encoding](), passes.run
        passes.run = lambda encoding, item: (encodings.append(encoding), run_pass(encoding, item))[1]  # type: ignore[method-assign, func-returns-value]
        answers = run(core, batch[:5]) | run(core, batch[5:])
        assert passes.num_replays >= len(info_blocks(core)) * sum(each.is_last for each in encodings)
        assert any(not each.is_last for each in encodings), "no pass was cut"
        assert core.stats().num_graph_steps
    for i, each in enumerate(batch):
        assert answers[each.request_id].error is None
        wanted = hf_greedy(one, info, prompts(name)[i % 5], 10 + i % 4)
        assert answers[each.request_id].token_ids == wanted, i
    assert watch.num_steps


def info_blocks(core: EngineCore) -> tuple[BlockCost, ...]:
    """Of the tower."""
    spec = core._runner.executor.body.model.spec.encoder
    assert spec is not None
    return spec.blocks


def vars_of(args: EngineArgs) -> dict[str, Any]:
    """The fields that were set, for ``simulated``."""
    usual = EngineArgs(model="x")
    found = {each.name: getattr(args, each.name) for each in fields(args)}
    return {name: value for name, value in found.items() if name != "device" and value != getattr(usual, name)}
