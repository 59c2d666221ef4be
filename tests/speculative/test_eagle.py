"""EAGLE heads: every draft is that of the head over the whole text, and tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.core.errors import ConfigError, UnsupportedModelError, WeightsError
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.draft_pacer import DraftPacer
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.runner.small_shapes import use_few_tails
from tests.sim.harness import arguments, ask_oracle, expected, folder_of_model, simulated
from tests.sim.rounding import settle
from tests.speculative.tiny_eagle import Oracle, save_eagle

BLOCK = KV_BLOCK_BYTES * 3 // 2
"""Bytes of a block, the head's layer included."""
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"third": False},
    "eagle3": {"third": True},
    "eagle3_reduced": {"third": True, "reduced": True},
    "eagle3_speculators": {"third": True, "reduced": True, "speculators": True},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("eagle")
    for name, kind in KINDS.items():
        save_eagle(folder / name, **kind)
    return {name: folder / name for name in KINDS}


def drafting(head: Path, number: int) -> dict[str, Any]:
    method = "eagle3" if "eagle3" in head.name else "eagle"
    config = {"method": method, "model": str(head), "num_speculative_tokens": number}
    return {"speculative_config": config | {"adaptive": False}}


def on_cpu(**sizes: Any) -> EngineCore:
    core = build_engine(arguments({"device": "cpu", "max_num_batched_tokens": 72} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


def check(core: EngineCore, batch: list[AddRequest]) -> None:
    answers, truth = run(core, batch), expected(batch)
    for each in batch:
        settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)


class DraftOracle(Protocol):
    """What a drafter shall say, computed over whole texts."""

    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """What follows ``tokens``."""


def compare_drafts(core: EngineCore, oracle: DraftOracle, number: int) -> int:
    """The drafts of every slot that is ready to go on; returns how many slots these are."""
    view = core._runner.executor.body._arena.view
    compared = 0
    for slot in range(len(view("alive"))):
        known = int(view("num_tokens")[slot])
        if view("alive")[slot] and int(view("num_computed")[slot]) == known - 1 and known > 1:
            text = view("history")[slot, :known].tolist()
            drafts = view("drafts")[slot].reshape(-1)[:number].tolist()
            assert drafts == oracle.drafts(text, number), f"slot {slot}, {known} tokens"
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("kind", "number"), [("eagle", 3), ("eagle3", 1), ("eagle3_reduced", 4), ("eagle3_speculators", 2)]
)
def test_drafts_are_those_of_the_head_over_the_whole_text(heads: dict[str, Path], kind: str, number: int) -> None:
    """In chunks, behind prefixes that are found, whole or with another token behind them, and after preemptions."""
    oracle = Oracle(folder_of_model(), heads[kind])
    prompt = [(7 * i) % 97 for i in range(33)]
    prompts = [prompt, prompt[:24], [*prompt[:24], 50, 51], prompt[:25], [*prompt[:16], 9] * 2]
    batch = [
        request(f"r{i}", each, seed=i, temperature=0.0, ignore_eos=True, max_tokens=14)
        for i, each in enumerate(prompts)
    ]
    sizes = {"kv_cache_memory_bytes": 20 * BLOCK, "max_num_batched_tokens": 20, "max_num_seqs": 3}
    core = on_cpu(run_ahead=0, **drafting(heads[kind], number), **sizes)
    compared, answers = 0, {each.request_id: Answer() for each in batch}
    for each in batch:
        core.add(each)
    while core.has_work():
        for update in core.step():
            answers[update.request_id].take(update)
        compared += compare_drafts(core, oracle, number)
    for each in batch:
        settle(answers[each.request_id], expected(batch)[each.request_id], each, ask_oracle)
    assert compared > 30 and core.stats().prefix_cache_hits > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("kind", "number", "depth"), [("eagle", 2, 1), ("eagle3_reduced", 4, 2), ("eagle3", 1, 4)])
def test_every_feature_on_the_cpu(heads: dict[str, Path], kind: str, number: int, depth: int) -> None:
    batch = requests_for(list(FEATURES.values()), seed=50 + number)
    core = on_cpu(run_ahead=depth, kv_cache_memory_bytes=21 * BLOCK, **drafting(heads[kind], number))
    check(core, batch)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("kind", "depth", "graphs"), [("eagle3_reduced", 2, True), ("eagle", 1, False)])
def test_on_the_simulated_device(heads: dict[str, Path], kind: str, depth: int, graphs: bool) -> None:
    names = ("greedy", "temperature", "schema", "host_grammar", "prompt_logprobs", "ignore_eos")
    batch = requests_for([FEATURES[name] for name in names], seed=60 + depth)
    sizes = {"max_num_seqs": 3, "enforce_eager": not graphs, "max_num_batched_tokens": 24}
    memory = {"kv_cache_memory_bytes": 22 * BLOCK}
    with simulated(5, run_ahead=depth, **drafting(heads[kind], 2), **(memory | sizes)) as (core, _, _):
        check(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs


class Fickle(DraftPacer):
    """Leaves drafts out, some or all, by chance."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths)
        self._rng = random.Random(len(widths))

    def observe(self, width: int, reached: Sequence[int], step_us: float | None) -> int:
        self.width = self._rng.choice(self._widths)
        return self.width


@pytest.mark.parametrize(("kind", "depth"), [("eagle3_reduced", 0), ("eagle3", 2)])
def test_drafts_may_come_and_go(heads: dict[str, Path], kind: str, depth: int) -> None:
    """The head's cache is kept up in steps without drafts, so that those of later steps are right."""
    oracle = Oracle(folder_of_model(), heads[kind])
    batch = requests_for([FEATURES[name] for name in ("greedy", "presence", "frequency", "bad_words")], seed=70)
    core = on_cpu(run_ahead=depth, kv_cache_memory_bytes=22 * BLOCK, **drafting(heads[kind], 3))
    core._draft_pacer = Fickle((1, 2, 4))
    answers, compared = {each.request_id: Answer() for each in batch}, 0
    for each in batch:
        core.add(each)
    while core.has_work():
        width = core._scheduler.width
        for update in core.step():
            answers[update.request_id].take(update)
        if depth == 0 and width > 1:  # the step drafted
            compared += compare_drafts(core, oracle, width - 1)
    for each in batch:
        settle(answers[each.request_id], expected(batch)[each.request_id], each, ask_oracle)
    assert depth or compared > 10
    core.shutdown()


@pytest.mark.parametrize("kind", ["eagle3_reduced"])
def test_drafts_may_come_and_go_on_the_simulated_device(
    heads: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_tails(monkeypatch)
    batch = requests_for([FEATURES[name] for name in ("greedy", "schema", "logprobs", "host_grammar")], seed=71)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 22 * BLOCK}
    with simulated(8, run_ahead=2, **drafting(heads[kind], 3), **sizes) as (core, _, _):
        core._draft_pacer = Fickle((1, 2, 4))
        check(core, batch)


def test_heads_that_do_not_fit_are_refused(heads: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="with method='eagle3'"):
        on_cpu(
            speculative_config={
                "method": "eagle", "model": str(heads["eagle3_speculators"]), "num_speculative_tokens": 2
            }
        )  # fmt: skip
    save_eagle(tmp_path / "eagle3", third=True, reduced=True)
    file = tmp_path / "eagle3" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, file)
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        on_cpu(**drafting(tmp_path / "eagle3", 2))
    save_file(tensors | {"d2t": torch.full((61,), 90)}, file)
    with pytest.raises(WeightsError, match="d2t"):
        on_cpu(**drafting(tmp_path / "eagle3", 2))
    with pytest.raises(ConfigError, match="needs model"):
        arguments({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}})
