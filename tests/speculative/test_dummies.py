"""Drafters whose folders hold no weights, as rehearsals and benchmarks run them: ``load_format`` is the drafter's, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.engine.core import EngineCore
from tests.engine.harness import request, run
from tests.speculative import test_mtp
from tests.speculative.test_eagle import on_cpu
from tests.speculative.tiny_dflash import KINDS, save_dflash
from tests.speculative.tiny_eagle import save_eagle
from tests.speculative.tiny_mtp import MODELS

EAGLES: dict[str, dict[str, bool]] = {
    "eagle": {"third": False},
    "eagle3": {"third": True},
    "eagle3-reduced": {"third": True, "reduced": True},
}
PROMPTS = [[(7 * i) % 97 for i in range(21)], [5, 6], [9] * 8]


def answers(core: EngineCore) -> tuple[list[list[int]], int]:
    """Tokens, and how many drafts were tried."""
    batch = [
        request(str(i), prompt, seed=i, temperature=0.0, ignore_eos=True, max_tokens=9)
        for i, prompt in enumerate(PROMPTS)
    ]
    found = run(core, batch)
    tried = core.stats().num_drafts
    core.check_integrity()
    core.shutdown()
    return [found[each.request_id].token_ids for each in batch], tried


@pytest.mark.parametrize("name", [*EAGLES, *KINDS])
def test_a_drafter_without_weights_changes_no_token(name: str, tmp_path: Path) -> None:
    if name in EAGLES:
        save_eagle(tmp_path, **EAGLES[name])
        method = name.partition("-")[0]
    else:
        save_dflash(tmp_path, KINDS[name])
        method = "dspark" if "dspark" in name else "dflash"
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
    config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2, "adaptive": False}
    plain, none = answers(on_cpu(load_format="dummy"))
    drafted, tried = answers(on_cpu(load_format="dummy", speculative_config=config))
    assert drafted == plain and all(len(each) == 9 for each in plain)
    assert tried > 0 == none


@pytest.mark.parametrize("name", MODELS)
def test_neither_do_a_models_own_layers(name: str) -> None:
    (plain, none), (drafted, tried) = (answers(test_mtp.on_cpu(name, number, load_format="dummy")) for number in (0, 2))
    assert drafted == plain and all(len(each) == 9 for each in plain)
    assert tried > 0 == none
