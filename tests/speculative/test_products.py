"""Drafter x features x depth x K x what is accepted x memory x device, drawn by chance: tokens are those of plain decoding, and
each draft is what the drafter says of the whole text, however many of the drafts before it were accepted."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.forced_drafts import Pattern, forced
from tests.engine.harness import Answer, run
from tests.engine.test_depths import FEATURES
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, expected, folder_of_model, simulated
from tests.sim.rounding import settle
from tests.speculative import test_mtp, tiny_dflash, tiny_eagle, tiny_mtp
from tests.speculative.repetitive import LOOPS, repetitive
from tests.speculative.steered import Steered, steered
from tests.speculative.test_eagle import DraftOracle, Fickle
from tests.speculative.test_probabilistic_heads import drafter

DRAFTERS = ("eagle", "eagle3", "dflash", "dspark", "mtp")
PATTERNS: tuple[Pattern, ...] = ("all", "random", "random", "none")
MTP = "v3"
TABLES = ("alive", "num_tokens", "num_computed", "temperature", "history")


@functools.cache
def draft_oracle(method: str) -> DraftOracle:
    if method == "mtp":
        return tiny_mtp.Oracle(MTP)
    if method in tiny_dflash.KINDS:
        return tiny_dflash.Oracle(folder_of_model(), Path(drafter(method)), tiny_dflash.KINDS[method])
    return tiny_eagle.Oracle(folder_of_model(), Path(drafter(method)))


class Case:
    """What ``seed`` draws."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"product {seed}")
        self.method = DRAFTERS[seed % len(DRAFTERS)]
        self.number, self.depth = rng.choice([1, 2, 3, 4]), rng.choice([0, 0, 1, 2, 4])
        self.pattern, self.comes_and_goes = rng.choice(PATTERNS), rng.random() < 0.3
        names = [*rng.sample(sorted(FEATURES | LOOPS), 7), "greedy", "presence", "ignore_eos"]
        self.requests = repetitive(names, seed)
        blocks = rng.choice([22, 26, 60])
        self.sizes: dict[str, Any] = {
            "max_num_seqs": rng.choice([2, 3, 5]),
            "max_num_batched_tokens": rng.choice([32, 40, 72]),
            "enable_prefix_caching": rng.random() < 0.7,
            "enforce_eager": rng.random() < 0.5,
            "run_ahead": self.depth,
        }
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.number, "adaptive": False}
        if self.method == "mtp":
            memory = test_mtp.pool(MTP, blocks)
            self.model = test_mtp.arguments(MTP, max_model_len=128)
        else:
            config["model"] = drafter(self.method)
            memory, self.model = 2 * blocks * KV_BLOCK_BYTES, {}
        self.config, self.sizes["kv_cache_memory_bytes"] = config, memory

    def __repr__(self) -> str:
        names = [each.request_id for each in self.requests]
        return f"{self.config} {self.pattern} {self.comes_and_goes} {self.sizes} {names}"

    def truth(self, requests: list[AddRequest]) -> dict[str, Answer]:
        """Answers without drafts."""
        return run(plain_mtp(), requests) if self.method == "mtp" else expected(requests)

    def play(self, core: EngineCore, said: list[Steered], truth: dict[str, Answer], *, synchronous: bool) -> int:
        """Run it, and compare; returns how many rows of drafts were compared."""
        if self.comes_and_goes:
            core._draft_pacer = Fickle((1, 1 + self.number))
        answers, compared = {each.request_id: Answer() for each in self.requests}, 0
        waiting = list(self.requests)
        while waiting or core.has_work():
            for _ in range(min(len(waiting), self.rng.choice([0, 1, 3]))):
                core.add(waiting.pop(0))
            width = core._scheduler.width
            for update in core.step():
                answers[update.request_id].take(update)
            if synchronous and width > 1 and compared < 25:
                compared += self.compare(core, said[0])
        for each in self.requests:
            settle(
                answers[each.request_id],
                truth[each.request_id],
                each,
                lambda asked: self.truth([asked])[asked.request_id],
            )
        return compared

    def compare(self, core: EngineCore, said: Steered) -> int:
        """The drafts of greedy rows that go on."""
        view, compared = core._runner.executor.body._arena.view, 0
        alive, known, computed, heat, history = (view(name) for name in TABLES)
        going = alive.bool() & (computed == known - 1) & (known > 1) & (heat == 0)
        for slot in going.nonzero()[:, 0].tolist():
            text = history[slot, : int(known[slot])].tolist()
            drafts = draft_oracle(self.method).drafts(text, self.number)
            assert said.said[slot].tolist() == drafts, f"slot {slot}, {len(text)} tokens"
            compared += 1
        return compared


@functools.cache
def plain_mtp() -> EngineCore:
    args = test_mtp.arguments(MTP, device="cpu", run_ahead=0, kv_cache_memory_bytes=2**20, enable_prefix_caching=False)
    core = build_engine(EngineArgs(**args), progress=False)
    core.learn(VOCABULARY)
    return core


def play(seed: int, *, on_device: bool) -> tuple[int, EngineCore]:
    case = Case(seed)
    made: list[Steered] = []
    truth = case.truth(case.requests)
    drafts = steered(case.config, forced(case.requests, truth, case.number, case.pattern), made)
    try:
        if on_device:
            with simulated(seed, drafts=drafts, **case.model, **case.sizes) as (core, _, _):
                return case.play(core, made, truth, synchronous=False), core
        args = arguments({"device": "cpu"} | case.model | case.sizes)
        core = build_engine(args, progress=False, drafts=drafts)
        core.learn(VOCABULARY)
        compared = case.play(core, made, truth, synchronous=case.depth == 0)
        core.check_integrity()
        core.shutdown()
        return compared, core
    except BaseException as error:
        error.add_note(repr(case))
        raise


def test_on_the_cpu() -> None:
    """Ten draws, two of each drafter."""
    compared = sum(play(seed, on_device=False)[0] for seed in range(10))
    assert compared > 40


@pytest.mark.parametrize("seed", [0, 3])
def test_on_the_simulated_device(seed: int) -> None:
    play(seed, on_device=True)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 110, 10))
def test_many_draws(seed: int) -> None:
    for each in range(seed, seed + 10):
        play(each, on_device=False)
    for each in range(seed, seed + 5):
        play(1000 + each, on_device=True)
