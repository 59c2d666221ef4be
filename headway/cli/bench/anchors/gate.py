"""The check before any figure counts: greedy output at the measured run-ahead equals the synchronous oracle's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.cli.bench.anchors.context import Bench, plain, random_prompts
from headway.core.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from headway.api.llm import LLM

ROWS = 4
NUM_TOKENS = 16


def answers(llm: LLM, bench: Bench, kinds: Sequence[dict[str, Any]] = ({},)) -> list[list[int]]:
    """Greedy tokens of a small fixed batch; ``kinds`` are its rows' other parameters, in turn."""
    length = min(bench.scale.row_prompt, 64)
    prompts = random_prompts(random.Random(11), ROWS, length, llm.model_info.vocab_size)
    params = [plain(NUM_TOKENS, **kinds[i % len(kinds)]) for i in range(ROWS)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), params, use_tqdm=False)]


def difference(found: list[list[int]], expected: list[list[int]]) -> str | None:
    """What is wrong, or None."""
    for row, (ours, wanted) in enumerate(zip(found, expected)):
        if ours != wanted:
            at = next((i for i, (a, b) in enumerate(zip(ours, wanted)) if a != b), min(len(ours), len(wanted)))
            return f"red test: row {row} differs from run_ahead=0 at token {at}: {ours[at : at + 3]}, not {wanted[at : at + 3]}"
    return None


def oracle(bench: Bench, **other: object) -> list[list[int]]:
    """The same batch's tokens without run-ahead, from an engine of its own."""
    with bench.open(**{**other, "run_ahead": 0}) as llm:
        return answers(llm, bench)


def of_fixed_width(bench: Bench) -> Bench:
    """The same with as many drafts in every step.

    How many of them pay is found out by the clock, so two runs verify different numbers of drafts at once. Products of other
    shapes round differently, which random weights, whose best tokens are often as good as equal, turn into other tokens.
    """
    drafts = bench.engine.get("speculative_config")
    if drafts is None or not SpeculativeConfig(**drafts).is_adaptive:
        return bench
    return replace(bench, engine=bench.engine | {"speculative_config": drafts | {"adaptive": False}})


def check(bench: Bench) -> str | None:
    """What is wrong with the measured engine's output, or None."""
    bench = of_fixed_width(bench)
    expected = oracle(bench)
    with bench.open() as llm:
        return difference(answers(llm, bench), expected)
