"""Keys and values in 8 bits: steps of many rows, the nano-vllm bench and, where the server's load is measured, that offline
once more, in rows of their own.

The goals beside them are those of 16 bits, which no other engine's figure here used less than.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headway.cli.bench.anchors import gate, generation
from headway.cli.bench.anchors.context import Bench
from headway.cli.bench.anchors.structured import OFFLINE_LOAD, offline_load
from headway.cli.bench.anchors.table import NOT_SERVED, REFUSED
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.api.llm import LLM

SUFFIX: Final = "_kv_fp8"
NANO: Final = f"nano_tok_s{SUFFIX}"
LOAD: Final = f"{OFFLINE_LOAD}{SUFFIX}"


def step_names(bench: Bench) -> dict[int, str]:
    """Figure of a greedy step, for the two largest numbers of rows."""
    return {rows: f"{generation.itl_name(rows)}{SUFFIX}" for rows in bench.scale.rows[-2:]}


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    steps = list(step_names(bench).values())
    bench.table.announce(steps, "ms")
    rates = [NANO, LOAD] if bench.full else [NANO]
    bench.table.announce(rates, "tok/s", "higher")
    return [*steps, *rates]


def measure(bench: Bench) -> None:
    """An engine for all but the load, which has the vocabulary that the load without 8 bits has."""
    names = announce(bench)
    bench = replace(bench, engine={**bench.engine, "kv_cache_dtype": "fp8"})
    _with_engine(bench, [name for name in names if name != LOAD])
    if bench.full:
        _with_engine(bench.with_vocabulary(bench.scale.vocab_49k), [LOAD])


def _with_engine(bench: Bench, names: list[str]) -> None:
    if not bench.table.wants(*names):
        return
    with bench.table.measuring(names):
        try:
            expected = gate.oracle(bench)
        except ConfigError as error:  # an older GPU
            bench.table.mark(names, NOT_SERVED, str(error))
            return
        with bench.open() as llm:
            wrong = gate.difference(gate.answers(llm, bench), expected)
            if wrong is not None:
                bench.table.mark(names, REFUSED, wrong)
                return
            for run in range(bench.runs):
                _figures(bench, llm, names, run)


def _figures(bench: Bench, llm: LLM, names: list[str], run: int) -> None:
    table = bench.table
    steps = {name: rows for rows, name in step_names(bench).items()}
    for name in names:
        if not table.wants(name):
            continue
        with table.measuring([name]):
            if name in steps:
                table.add(name, generation.greedy_step_ms(bench, llm, steps[name], run))
            else:
                table.add(name, generation.nano_rate(bench, llm) if name == NANO else offline_load(bench, llm, run))
