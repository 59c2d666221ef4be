"""Mixtures: how many experts of a layer a decode step reads, and the time that its bytes take then.

Tokens of dummy weights may resemble each other, and then go to the same experts: a step is fast for the wrong reason. So the
experts are counted in an engine of its own, without graphs, and the floor follows from what was counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.cli.bench.anchors import floors
from headway.cli.bench.anchors.context import Bench, plain, random_prompts, seconds, spec_of
from headway.cli.bench.anchors.table import NOT_SERVED

if TYPE_CHECKING:
    import torch

TOKENS = 16
"""Decode steps that are counted."""


def count_name(rows: int) -> str:
    """Distinct experts of a layer that a decode step of ``rows`` rows reads, on average."""
    return f"experts_read_bs{rows}"


def floor_name(rows: int) -> str:
    """What such a step's bytes take, at the card's bandwidth and at the mean length of the short figures."""
    return f"floor_ms_by_experts_bs{rows}"


def announce(bench: Bench) -> list[str]:
    """The figures of this module; none for models without mixtures."""
    if not floors.mixtures(spec_of(bench)):
        return []
    counts, least = ([name(rows) for rows in bench.scale.rows] for name in (count_name, floor_name))
    bench.table.announce(counts, "experts a layer", "higher")
    bench.table.announce(least, "ms")
    return [*counts, *least]


def measure(bench: Bench, card: str) -> None:
    """Count what is wanted, with one engine."""
    names = announce(bench)
    if not names or not bench.table.wants(*names):
        return
    speed, scale, length = floors.bandwidth(card), bench.scale, floors.short_length(bench.scale)
    if speed is None:
        bench.table.mark([floor_name(rows) for rows in scale.rows], NOT_SERVED, "this card's bandwidth is not known")
    with _recorded() as found, bench.open(enforce_eager=True) as llm:
        for rows in scale.rows:
            with bench.table.measuring([count_name(rows), floor_name(rows)]):
                found.clear()
                prompts = random_prompts(random.Random(rows), rows, scale.row_prompt, llm.model_info.vocab_size)
                seconds(llm, prompts, plain(TOKENS))
                counted = _mean_distinct(found, rows, floors.mixtures(spec_of(bench))[0].num_experts)
                bench.table.add(count_name(rows), counted)
                if speed is not None:
                    bench.table.add(floor_name(rows), floors.step_ms(bench, rows, length, speed, counted))


@contextmanager
def _recorded() -> Iterator[list[torch.Tensor]]:
    """Experts of each layer's tokens, int32 [T, K] each, in the order in which they are chosen."""
    from headway.models.layers import moe

    found: list[torch.Tensor] = []
    ops = {name: vars(moe)[name] for name in ("route_experts", "norm_route_experts")}

    def recording(op: Any) -> Any:
        def run(*arguments: Any) -> Any:
            results = op(*arguments)
            found.append(results[0].clone())
            return results

        return run

    vars(moe).update({name: recording(op) for name, op in ops.items()})
    try:
        yield found
    finally:
        vars(moe).update(ops)


def _mean_distinct(found: list[torch.Tensor], rows: int, experts: int) -> float:
    """Of steps in which ``rows`` tokens live; numbers from ``experts`` on are shared blocks', which all tokens pass."""
    counts = []
    for ids in found:
        live = ids[ids[:, 0] >= 0]
        if len(live) == rows:
            counts.append(live[live < experts].unique().numel())
    return sum(counts) / max(len(counts), 1)
