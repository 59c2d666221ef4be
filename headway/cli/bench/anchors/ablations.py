"""What each technique buys: one engine with one thing off at a time, as far as arguments and the environment can say it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from headway.cli.bench.anchors import gate
from headway.cli.bench.anchors.context import Bench, plain, random_prompts, seconds, spec_of, step_ms
from headway.cli.bench.anchors.generation import prefill_rate
from headway.cli.bench.anchors.table import REFUSED
from headway.core.switches import EARLY_LAUNCH, FAST_PREFILL, FUSED_LAYERS, PREFILL_GRAPHS

VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "no_early_launch": {},
    "no_fused_layers": {},
    "eager_prefill": {},
    "no_fast_prefill": {},
    "no_graphs": {"enforce_eager": True},
    "depth0": {"run_ahead": 0},
    "depth1": {"run_ahead": 1},
    "depth2": {"run_ahead": 2},
    "depth4": {"run_ahead": 4},
}
SWITCHES: Final = {
    "no_early_launch": EARLY_LAUNCH,
    "no_fused_layers": FUSED_LAYERS,
    "eager_prefill": PREFILL_GRAPHS,
    "no_fast_prefill": FAST_PREFILL,
}
ALONE_REPEATS: Final = 5


def names_of(bench: Bench, variant: str) -> list[str]:
    """The figures of one variant; the last two are the time to first token, and prompts' tokens a second."""
    steps = [f"itl_ms_bs{rows}" for rows in bench.scale.rows]
    return [f"ablation_{variant}_{name}" for name in (*steps, "ttft_ms", "prefill_tok_s")]


def variants_of(bench: Bench) -> dict[str, dict[str, Any]]:
    """Those that change anything: of fast prefill where upper layers of the model cache nothing."""
    shares = spec_of(bench).narrow_layers > 0
    return {name: given for name, given in VARIANTS.items() if shares or name != "no_fast_prefill"}


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    names = []
    for variant in variants_of(bench):
        found = names_of(bench, variant)
        bench.table.announce(found[:-1], "ms")
        bench.table.announce(found[-1:], "tok/s", "higher")
        names += found
    return names


def measure(bench: Bench) -> None:
    """One engine per variant, each checked against the synchronous oracle with the same kernels."""
    announce(bench)
    expected: dict[tuple[bool, str | None], list[list[int]]] = {}
    for variant, given in variants_of(bench).items():
        names = names_of(bench, variant)
        if not bench.table.wants(*names):
            continue
        with bench.table.measuring(names):
            eager, variable = bool(given.get("enforce_eager", False)), SWITCHES.get(variant)
            with switched_off(variable):
                if (eager, variable) not in expected:
                    expected[eager, variable] = gate.oracle(bench, enforce_eager=eager)
                _variant(bench, names, given, expected[eager, variable])


@contextmanager
def switched_off(variable: str | None) -> Iterator[None]:
    """Engines built inside do without the technique behind ``variable`` (``core.switches``)."""
    with patch.dict(os.environ, {} if variable is None else {variable: "0"}):
        _read_again()
        yield
    _read_again()


def _read_again() -> None:
    loaded = sys.modules.get("headway.kernels.triton_early")  # only where Triton is
    if loaded is not None:
        loaded.launch_early.cache_clear()


def _variant(bench: Bench, names: list[str], given: dict[str, Any], expected: list[list[int]]) -> None:
    scale, table = bench.scale, bench.table
    with bench.open(**given) as llm:
        wrong = gate.difference(gate.answers(llm, bench), expected)
        if wrong is not None:
            table.mark(names, REFUSED, wrong)
            return
        vocab = llm.model_info.vocab_size
        for run in range(bench.runs):
            for name, rows in zip(names, scale.rows):
                if table.wants(name):
                    step_ms(llm, rows, scale.row_prompt, (1, 2), [{}], 5)  # loads this shape's kernels
                    lengths = (scale.variant_short, scale.variant_long)
                    table.add(name, step_ms(llm, rows, scale.row_prompt, lengths, [{}], rows + run))
            rng = random.Random(run)
            alone, prefill = names[-2:]
            if table.wants(alone):
                each = [
                    seconds(llm, random_prompts(rng, 1, scale.alone, vocab), plain(1)) for _ in range(ALONE_REPEATS)
                ]
                table.add(alone, min(each) * 1e3)
            if table.wants(prefill):
                table.add(prefill, prefill_rate(bench, llm, rng))
