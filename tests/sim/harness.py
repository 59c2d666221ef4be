"""Engines on a simulated device, everything that can be checked switched on; and random scenarios from one number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from headway.core.config import USUAL_THRESHOLDS, EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.device.sim import SimDevice
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, run
from tests.engine.test_fuzz import random_request
from tests.engine.tiny_grammars import LARK, VOCABULARY, host_grammar
from tests.engine.tiny_llama import EOS, KV_BLOCK_BYTES, save_tiny_llama
from tests.sim.rounding import settle, settle_prefix
from tests.sim.watch import PlanWatch

ROOMY_BLOCKS = 200
MOST_IDLE = 200
"""Turns without a step while requests are open. A turn waits for a mask up to 50 ms, so this is no race against the matcher."""
SMALL_SEEDS = 10**6
"""Scenarios of smaller numbers are short: a few hundred of them belong to every test run."""


@cache
def model_folder() -> str:
    """A tiny Llama, written once per process."""
    folder = Path(mkdtemp(prefix="headway-sim-"))
    save_tiny_llama(folder)
    return str(folder)


def arguments(overrides: dict[str, Any]) -> EngineArgs:
    args: dict[str, Any] = {
        "model": model_folder(),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "kv_cache_memory_bytes": ROOMY_BLOCKS * KV_BLOCK_BYTES,
    }
    return EngineArgs(**(args | overrides))


def folder_of_model() -> Path:
    """Where the tiny Llama of all these engines lies."""
    return Path(model_folder())


@contextmanager
def simulated(seed: int, **overrides: Any) -> Iterator[tuple[EngineCore, SimDevice, PlanWatch]]:
    """An engine on a simulated device; raises at the end what the engine swallowed, and checks that nothing leaked.

    ``overrides`` are arguments of the engine; ``thresholds``, ``drafts`` and ``pooling`` those of ``build_engine``.
    """
    watch, thresholds = PlanWatch(), overrides.pop("thresholds", USUAL_THRESHOLDS)
    extras = {name: overrides.pop(name, None) for name in ("drafts", "pooling")}
    with SimDevice(seed, observers=watch.observers()) as device:
        args = arguments(overrides)
        core = build_engine(args, progress=False, device=device, thresholds=thresholds, **extras)
        device.wait_idle()  # the warm-up's steps are nobody's plan
        watch.attach(core)
        device.arm()
        core.learn(VOCABULARY)
        yield core, device, watch
        core.shutdown()
        device.disarm()
        device.wait_idle()
        core.check_integrity()


@cache
def oracle_engine() -> EngineCore:
    """The synchronous engine on the CPU, with memory to spare and no cache."""
    core = build_engine(arguments({"device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}), progress=False)
    core.learn(VOCABULARY)
    return core


def expected(requests: list[AddRequest]) -> dict[str, Answer]:
    """What each request gives on the oracle."""
    return run(oracle_engine(), requests)


def ask_oracle(request: AddRequest) -> Answer:
    """What one request gives there."""
    return expected([request])[request.request_id]


@dataclass
class Scenario:
    """An engine and what happens to it, all drawn from ``seed``. Seeds below ``SMALL_SEEDS`` give short ones."""

    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    requests: list[AddRequest] = field(default_factory=list)
    abort_rate: float = 0.0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        small = self.seed < SMALL_SEEDS
        seqs = rng.choice([1, 2, 4] if small else [1, 2, 4, 6, 8])
        self.overrides = {
            "run_ahead": rng.choice([0, 1, 2, 3, 4, 8, "auto"]),
            "enforce_eager": rng.random() < 0.5,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": rng.choice([8, 16, 40, 64]),
            "enable_prefix_caching": rng.random() < 0.7,
            "kv_cache_memory_bytes": rng.choice([17, 18, 22, 40]) * KV_BLOCK_BYTES,
        }
        self.requests = [random_request(rng, i) for i in range(rng.randrange(2, 5 if small else 14))]
        for request in self.requests[1:]:
            if rng.random() < 0.25:  # a prompt that may be cached whole, of whole blocks or not
                same = rng.choice(self.requests).prompt_token_ids
                request.prompt_token_ids = same[: rng.choice([8, 16, len(same)])]
        self.abort_rate = rng.choice([0.0, 0.0, 0.1, 0.3])
        self.requests += self._left_to_the_host(random.Random(f"host grammars of {self.seed}"))

    def _left_to_the_host(self, rng: random.Random) -> list[AddRequest]:
        """Requests that lag; drawn apart, so that all else of a seed is what it was without them."""
        made = [random_request(rng, len(self.requests) + i) for i in range(rng.choice([0, 0, 1, 2]))]
        for each in made:
            most = min(each.params.max_tokens or 1, 127 - len(each.prompt_token_ids))
            each.params = SamplingParams(detokenize=False, temperature=1.3, max_tokens=most)
            each.automaton, each.bad_words_token_ids, each.eos_token_ids = None, [], EOS
            each.host_grammar = host_grammar("grammar", LARK)
        return made

    @property
    def max_turns(self) -> int:
        """Turns of the loop in which every request must have ended: a token a turn would do, chunks and preemptions take
        more, each with the pipeline's depth behind it."""
        tokens = sum(len(each.prompt_token_ids) + (each.params.max_tokens or 0) for each in self.requests)
        return 500 + 20 * tokens

    def play(self) -> None:
        """Run it and compare with the oracle."""
        rng, truth = self.rng, expected(self.requests)
        answers = {request.request_id: Answer() for request in self.requests}
        aborted: set[str] = set()
        with simulated(self.seed, **self.overrides) as (core, _, _):
            waiting, turns, idle, told = list(self.requests), 0, 0, 0
            while waiting or core.has_work():
                turns += 1
                assert turns <= self.max_turns, "the engine turns without progress"
                idle = 0 if waiting or told != core.stats().num_steps else idle + 1
                told = core.stats().num_steps
                assert idle <= MOST_IDLE, f"the engine launches nothing, open: {core.stats()}"
                for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
                    core.add(waiting.pop(0))
                if rng.random() < self.abort_rate:
                    victim = str(rng.randrange(len(self.requests) - len(waiting) or 1))
                    if answers[victim].finish_reason is None and victim not in {r.request_id for r in waiting}:
                        core.abort(victim)
                        aborted.add(victim)
                for update in core.step():
                    assert update.request_id not in aborted, "an update after the abort"
                    answers[update.request_id].take(update)
        for request in self.requests:
            answer, true = answers[request.request_id], truth[request.request_id]
            check = settle_prefix if request.request_id in aborted else settle
            check(answer, true, request, ask_oracle)


def play(seed: int) -> None:
    """Play the scenario of ``seed``; a failure says how to see it again."""
    try:
        Scenario(seed).play()
    except BaseException as error:
        error.add_note(f"again: python -m tests.sim.replay {seed}")
        raise
