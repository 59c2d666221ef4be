"""Layers for multi-token prediction and drafters of blocks on a card: their drafts are those of the oracles, and tokens are the
same at every depth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.speculative import SpeculativeConfig
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, request, run
from tests.sim.harness import folder_of_model
from tests.speculative import tiny_dflash, tiny_mtp
from tests.speculative.test_eagle import compare_drafts

pytestmark = pytest.mark.gpu

Make = Callable[[int], EngineCore]


def engine(folder: Path | str, depth: int, **speculative: Any) -> EngineCore:
    config = SpeculativeConfig(**speculative, adaptive=False)
    args = EngineArgs(
        model=str(folder), dtype="float32", device="cuda", run_ahead=depth, max_model_len=128, max_num_seqs=3, block_size=16,
        max_num_batched_tokens=20, kv_cache_memory_bytes=2**22, speculative_config=config,
    )  # fmt: skip
    return build_engine(args, progress=False)


def requests() -> list[Any]:
    prompt = [3 + (7 * i) % 90 for i in range(33)]
    prompts = [prompt, prompt[:24], [*prompt[:24], 50, 51], prompt[:25]]
    return [
        request(f"r{i}", each, seed=i, temperature=0.0, ignore_eos=True, max_tokens=12)
        for i, each in enumerate(prompts)
    ]


def drafted_alike(make: Make, oracle: Any, number: int) -> None:
    core, compared = make(0), 0
    answers = {each.request_id: Answer() for each in requests()}
    for each in requests():
        core.add(each)
    while core.has_work():
        for update in core.step():
            answers[update.request_id].take(update)
        compared += compare_drafts(core, oracle, number)
    core.shutdown()
    assert compared > 10
    deep = make(2)
    assert {key: each.token_ids for key, each in run(deep, requests()).items()} == {
        key: each.token_ids for key, each in answers.items()
    }
    deep.shutdown()


@pytest.mark.parametrize("name", tiny_mtp.MODELS)
def test_layers_for_multi_token_prediction(name: str) -> None:
    drafted_alike(
        lambda depth: engine(tiny_mtp.folder_of(name), depth, method="mtp", num_speculative_tokens=3),
        tiny_mtp.Oracle(name),
        3,
    )


@pytest.mark.parametrize("name", tiny_dflash.KINDS)
def test_drafters_of_blocks(name: str, tmp_path: Path) -> None:
    kind, folder = tiny_dflash.KINDS[name], tmp_path / "drafter"
    tiny_dflash.save_dflash(folder, kind)
    method = "dspark" if kind.spark else "dflash"
    drafted_alike(
        lambda depth: engine(
            folder_of_model(), depth, method=method, model=str(folder), num_speculative_tokens=kind.most
        ),
        tiny_dflash.Oracle(folder_of_model(), folder, kind),
        kind.most,
    )
