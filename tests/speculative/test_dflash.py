"""Drafters of blocks: every draft is that of the drafter over the whole text, and tokens are those of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError, HeadwayError, UnsupportedModelError
from tests.engine.harness import Answer, request
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.runner.small_shapes import use_few_tails
from tests.sim.harness import ask_oracle, expected, folder_of_model, simulated
from tests.sim.rounding import settle
from tests.speculative.test_eagle import Fickle, check, compare_drafts, on_cpu
from tests.speculative.tiny_dflash import BLOCK_SIZE, KINDS, Oracle, config_of, save_dflash

BLOCK = KV_BLOCK_BYTES * 2
"""Bytes of a block, the drafter's two layers included."""


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dflash")
    for name, kind in KINDS.items():
        save_dflash(folder / name, kind)
    return {name: folder / name for name in KINDS}


def drafting(drafter: Path, number: int) -> dict[str, Any]:
    method = "dspark" if "dspark" in drafter.name else "dflash"
    config = {"method": method, "model": str(drafter), "num_speculative_tokens": number, "adaptive": False}
    return {"speculative_config": config}


@pytest.mark.parametrize(
    ("name", "number", "fickle"), [*[(name, KINDS[name].most, False) for name in KINDS], ("dflash", 2, True)]
)
def test_drafts_are_those_of_the_drafter_over_the_whole_text(
    drafters: dict[str, Path], name: str, number: int, fickle: bool
) -> None:
    """In chunks, behind prefixes that are found, whole or with another token behind them, after preemptions and, where they are
    fickle, after steps without drafts."""
    oracle = Oracle(folder_of_model(), drafters[name], KINDS[name])
    prompt = [(7 * i) % 97 for i in range(33)]
    prompts = [prompt, prompt[:24], [*prompt[:24], 50, 51], prompt[:25], [*prompt[:16], 9] * 2]
    batch = [
        request(f"r{i}", each, seed=i, temperature=0.0, ignore_eos=True, max_tokens=14)
        for i, each in enumerate(prompts)
    ]
    sizes = {"kv_cache_memory_bytes": 20 * BLOCK, "max_num_batched_tokens": 20, "max_num_seqs": 3}
    core = on_cpu(run_ahead=0, **drafting(drafters[name], number), **sizes)
    compared, answers = 0, {each.request_id: Answer() for each in batch}
    for each in batch:
        core.add(each)
    core._draft_pacer = Fickle((1, 2, number + 1)) if fickle else None
    while core.has_work():
        width = core._scheduler.width
        for update in core.step():
            answers[update.request_id].take(update)
        if width > 1:  # the step drafted, and a block's tokens see one another: its width matters
            compared += compare_drafts(core, oracle, width - 1)
    truth = expected(batch)
    for each in batch:
        settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)
    assert compared > (10 if fickle else 30) and core.stats().prefix_cache_hits > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("name", "number", "depth"), [
    ("dflash", 4, 2), pytest.param("dspark_speculators", 2, 4, marks=pytest.mark.soak),
])  # fmt: skip
def test_every_feature_on_the_cpu(drafters: dict[str, Path], name: str, number: int, depth: int) -> None:
    batch = requests_for(list(FEATURES.values()), seed=150 + number)
    core = on_cpu(run_ahead=depth, kv_cache_memory_bytes=21 * BLOCK, **drafting(drafters[name], number))
    check(core, batch)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("name", "depth", "graphs"), [
    ("dspark", 2, True), pytest.param("dflash_speculators", 1, False, marks=pytest.mark.soak),
])  # fmt: skip
def test_on_the_simulated_device(
    drafters: dict[str, Path], name: str, depth: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_tails(monkeypatch)
    names = ("greedy", "schema", "host_grammar", "ignore_eos")
    batch = requests_for([FEATURES[each] for each in names], seed=160 + depth)
    sizes = {"max_num_seqs": 3, "enforce_eager": not graphs, "max_num_batched_tokens": 24}
    memory = {"kv_cache_memory_bytes": 22 * BLOCK}
    with simulated(5, run_ahead=depth, **drafting(drafters[name], 3), **(memory | sizes)) as (core, _, _):
        core._draft_pacer = Fickle((1, 2, 4))
        check(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs


@pytest.mark.parametrize(("kind", "change", "why"), [
    ("dflash", {"layer_types": ["sliding_attention", "full_attention"]}, "full attention"),
    ("dflash", {"dflash_config": {"mask_token_id": 400, "target_layer_ids": [0]}}, "mask_token_id must be a token"),
    ("dflash", {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}, "lie in 0 to 1"),
    ("dflash", {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0], "causal": True}}, r"dflash_config\.causal"),
    ("dflash", {"hidden_size": 64}, "trained for another model"),
    ("dspark", {"markov_head_type": "rnn"}, "vanilla and gated"),
    ("dspark", {"markov_rank": None}, "markov_rank"),
    ("dspark_speculators", {"speculators_model_type": "dflash"}, "give it as method='dflash'"),
])  # fmt: skip
def test_what_is_not_honoured_is_refused(tmp_path: Path, kind: str, change: dict[str, Any], why: str) -> None:
    folder = tmp_path / kind
    save_dflash(folder, KINDS[kind])
    config = config_of(KINDS[kind]) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((UnsupportedModelError, HeadwayError), match=why):
        on_cpu(**drafting(folder, 2))


def test_more_drafts_than_a_block_has_are_refused(drafters: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=f"more than the {BLOCK_SIZE - 1} tokens"):
        on_cpu(**drafting(drafters["dflash"], BLOCK_SIZE))
    with pytest.raises(UnsupportedModelError, match="method='dspark'"):
        on_cpu(speculative_config={"method": "dflash", "model": str(drafters["dspark"]), "num_speculative_tokens": 2})
