"""What a step launches: a feature that no row uses costs nothing, whoever owned the slots before, and padding is the least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.device.sim import SimDevice
from headway.engine.boot import build_engine
from tests.engine.harness import run
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.sim.harness import arguments

RANDOM, TOP, MIN_P, WIDE, PENALTIES = 1, 2, 4, 8, 32
OPTIONAL = (
    "logit_bias",
    "allowed_tokens",
    "min_tokens",
    "bad_words",
    "grammar_mask",
    "grammar_advance",
    "gather_logprobs",
)
NEEDED: dict[str, tuple[int, set[str]]] = {
    "greedy": (0, set()),
    "temperature": (RANDOM, set()),
    "top_k": (RANDOM | TOP, set()),
    "top_p": (RANDOM | TOP | WIDE, set()),
    "min_p": (RANDOM | MIN_P | WIDE, set()),
    "presence": (PENALTIES, {"count_tokens"}),
    "frequency": (PENALTIES, {"count_tokens"}),
    "repetition": (PENALTIES, {"count_tokens"}),
    "logit_bias": (RANDOM, {"logit_bias"}),
    "allowed_token_ids": (RANDOM, {"allowed_tokens"}),
    "bad_words": (0, {"bad_words"}),
    "min_tokens": (RANDOM, {"min_tokens"}),
    "stop_token_ids": (RANDOM, set()),
    "ignore_eos": (RANDOM, set()),
    "logprobs": (RANDOM, {"gather_logprobs"}),
    "logprob_token_ids": (RANDOM, {"gather_logprobs"}),
    "pattern": (RANDOM, {"grammar_mask", "grammar_advance"}),
    "host_grammar": (RANDOM, {"allowed_tokens", "gather_logprobs"}),
}
"""Flags of the draw, and the operations beside it, of steps whose rows use one feature each."""


def short(name: str) -> dict[str, Any]:
    """The feature, for a few tokens."""
    least = {"min_tokens": 3} if "min_tokens" in FEATURES[name] else {}
    return FEATURES[name] | {"max_tokens": 4} | least


class Launched:
    """What ran on a simulated device: operations, flags of draws, and the padded tokens of steps."""

    def __init__(self) -> None:
        self.operations: set[str] = set()
        self.flags: set[int] = set()
        self.padded: list[int] = []

    def observers(self) -> list[tuple[str, Any]]:
        def note(name: str) -> Any:
            return lambda args: self.operations.add(name)

        def drew(args: Sequence[Any]) -> None:
            self.flags.add(int(args[-1]))

        def unpacked(args: Sequence[Any]) -> None:
            self.padded.append(int(args[5].shape[0]))

        others = [(name, note(name)) for name in (*OPTIONAL, "count_tokens")]
        return [*others, ("sample", drew), ("step_unpack", unpacked)]

    def clear(self) -> None:
        self.operations.clear()
        self.flags.clear()
        self.padded.clear()


def test_a_feature_costs_only_rows_that_use_it_after_slots_were_reused() -> None:
    launched = Launched()
    with SimDevice(3, observers=launched.observers()) as device:
        core = build_engine(arguments({"enforce_eager": True, "run_ahead": 0, "max_num_seqs": 4}), device=device)
        core.learn(VOCABULARY)
        run(
            core, requests_for([short(name) for name in NEEDED], seed=3)
        )  # every slot has had owners that wanted everything
        for name, (flags, operations) in NEEDED.items():
            device.wait_idle()
            launched.clear()
            run(core, requests_for([short(name)] * 2, seed=4))
            device.wait_idle()
            assert launched.flags == {flags}, name
            assert launched.operations == operations, name
        core.shutdown()


@pytest.mark.parametrize("rows", [3, 4])
def test_graphs_of_plain_steps_do_no_more_than_they_need(rows: int) -> None:
    launched = Launched()
    with SimDevice(4, observers=launched.observers()) as device:
        core = build_engine(arguments({"run_ahead": 1, "max_num_seqs": 4}), device=device)
        core.learn(VOCABULARY)
        run(core, requests_for([FEATURES[name] for name in ("logprobs", "bad_words", "presence", "pattern")], seed=3))
        before = core.stats()
        for name, flags in (("greedy", 0), ("temperature", RANDOM)):
            device.wait_idle()
            launched.clear()
            run(core, requests_for([FEATURES[name] | {"ignore_eos": True}] * rows, seed=4))
            device.wait_idle()
            assert launched.operations == set() and launched.flags == {flags}, name
            wanted = next(bucket for bucket in (1, 2, 4) if bucket >= rows)
            assert wanted in launched.padded and not {3, 5, 8} & {*launched.padded}, (
                "the smallest graph that holds them"
            )
        after = core.stats()
        assert after.num_graph_steps - before.num_graph_steps == after.num_steps - before.num_steps
        core.shutdown()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_running_engine_takes_no_new_host_memory_or_events(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings settle: the same work again needs nothing that the first time did not leave."""
    taken: list[str] = []
    with SimDevice(5, speeds=(1.0, 1.0)) as device:
        core = build_engine(arguments({"run_ahead": depth}), device=device)
        batch = requests_for([FEATURES[name] for name in ("greedy", "logprobs", "ignore_eos")] * 2, seed=4)
        run(core, batch)
        run(core, batch)
        host_ints, new_event = device.host_ints, device.new_event

        def new_ints(num_ints: int) -> Any:
            taken.append("ints")
            return host_ints(num_ints)

        def another_event(timing: bool = False) -> Any:
            taken.append("event")
            return new_event(timing)

        monkeypatch.setattr(device, "host_ints", new_ints)
        monkeypatch.setattr(device, "new_event", another_event)
        run(core, batch)
        assert len(taken) <= depth, taken
        core.shutdown()
