"""Times the step and sampling operations at a vocabulary of 151,936 and compares with what the memory allows.

    python bench/ops/sampling.py [--only sample] [--rows 1,64]

Each figure is the mean over a CUDA graph of many calls, the best of several replays. The floor is the bytes that the
operation must move over 4.44 TB/s, one H200's limit. Calls walk over several copies of the logits, so that they
come from memory; in an engine the L2 cache may still hold those of a few rows. Every case is first compared with its
reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.apply_edits import apply_edits
from headway.kernels.bad_words import bad_words
from headway.kernels.count_tokens import count_tokens
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.kernels.penalties import penalties
from headway.kernels.registry import Op
from headway.kernels.sample import MIN_P, RANDOM, TOP, sample
from headway.kernels.slot_advance import slot_advance
from headway.kernels.step_unpack import step_unpack

BYTES_PER_US = 4.44e6
VOCAB, LENGTH, SLOTS, STOPS, BLOCK_SIZE = 151_936, 4096, 256, 80, 16
COLD_BYTES = 128 * 2**20
"""Logits are walked over at least this much memory: more than twice the L2."""


@dataclass(frozen=True)
class Case:
    """One cell of the table: an operation's calls (timed one after the other) and the bytes one must move."""

    op: Op
    label: str
    calls: list[tuple[Any, ...]]
    moved: float


def ints(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32, device="cuda")


def floats(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, device="cuda")


def draw_ids(*shape: int, high: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32, device="cuda")


def packed_decode(rows: int) -> torch.Tensor:
    """A packed step of ``rows`` decode rows and as many one-value edits."""
    records = [number for row in range(rows) for number in (row, 1, row, 1)]
    at = 16 + len(records)
    edits = [number for row in range(rows) for number in (row * 3, 16 + row, 1)]
    return torch.tensor([rows, at, rows, rows, 16, 1] + [0] * 10 + records + edits, dtype=torch.int32, device="cuda")


def step_cases(rows: int) -> Iterator[Case]:
    """The operations on the slot tables, whose bytes are few: their floor is a launch."""
    packed, slots = packed_decode(rows), torch.arange(rows, dtype=torch.int32, device="cuda")
    history, counts = draw_ids(SLOTS, LENGTH), torch.zeros(SLOTS, VOCAB, dtype=torch.int16, device="cuda")
    known, one = ints(SLOTS, value=512), ints(SLOTS, value=1)
    yield Case(apply_edits, "", [(ints(SLOTS * 8), packed, rows)], 20.0 * rows)
    tables = draw_ids(SLOTS, LENGTH // BLOCK_SIZE, high=1000)
    outputs = [ints(rows), ints(rows), ints(rows), ints(rows + 1), ints(rows), ints(rows), ints(rows)]
    args = (packed, history, known, one, tables, *outputs, BLOCK_SIZE, 1)
    yield Case(step_unpack, "decode", [args], 52.0 * rows)
    advance = (
        packed, slots, slots, history, known.clone(), known.clone(), one.clone(), counts, one, ints(SLOTS),
        ints(SLOTS, value=LENGTH), ints(SLOTS, 2, value=2), ints(SLOTS, STOPS), ints(4, rows, 4),
    )  # fmt: skip
    yield Case(slot_advance, "", [advance], (STOPS + 20) * 4.0 * rows)
    yield Case(
        count_tokens, "512 tokens", [(counts, slots, history, known // 2, known, LENGTH)], rows * (2.0 * VOCAB + 2048)
    )


def processor_cases(rows: int, logits: list[torch.Tensor], slots: torch.Tensor) -> Iterator[Case]:
    """The logits processors with every row using the feature, and one with none."""
    wide = 4.0 * rows * VOCAB
    on, known = ints(SLOTS, value=1), ints(SLOTS, value=512)
    history = draw_ids(SLOTS, LENGTH)
    counts = torch.where(torch.rand(SLOTS, VOCAB, device="cuda") < 0.01, 1, 0).short()
    bias = (
        slots,
        ints(SLOTS, value=300),
        torch.arange(1024, device="cuda").int().repeat(SLOTS, 1),
        floats(SLOTS, 1024),
    )
    yield Case(logit_bias, "300 ids", [(x, *bias) for x in logits], rows * 300.0 * 16)
    bits = draw_ids(SLOTS, cdiv(VOCAB, 32), high=2**31 - 1)
    yield Case(allowed_tokens, "half", [(x, slots, on, bits) for x in logits], wide / 2 + wide / 32)
    stops = (known, known + 1, ints(SLOTS, 2, value=STOPS), draw_ids(SLOTS, STOPS))
    yield Case(min_tokens, "", [(x, slots, *stops) for x in logits], rows * STOPS * 8.0)
    rates = (floats(SLOTS, value=1.1), floats(SLOTS, value=0.1), floats(SLOTS, value=0.1))
    yield Case(penalties, "1 % seen", [(x, slots, counts, on, *rates) for x in logits], wide / 2 + wide / 50)
    yield Case(penalties, "off", [(x, slots, counts, ints(SLOTS), *rates) for x in logits], 0)
    offsets = (torch.arange(257, device="cuda") * 3).int().repeat(SLOTS, 1)
    words = (history, known, known // 2, ints(SLOTS, value=256), offsets, draw_ids(SLOTS, 2048))
    yield Case(bad_words, "256 phrases", [(x, slots, *words) for x in logits], rows * 256 * 16.0)


def draw_cases(rows: int, logits: list[torch.Tensor], slots: torch.Tensor) -> Iterator[Case]:
    """``sample`` with and without filters, on peaked and on flat rows, and ``gather_logprobs``."""
    wide = 4.0 * rows * VOCAB
    known, seeds = ints(SLOTS, value=512), draw_ids(SLOTS, 2)

    def drawing(heat: float, k: int, p: float, low: float, flags: int) -> list[tuple[Any, ...]]:
        table = (floats(SLOTS, value=heat), ints(SLOTS, value=k), floats(SLOTS, value=p), floats(SLOTS, value=low))
        return [(x, slots, *table, seeds, known, flags) for x in logits]

    yield Case(sample, "greedy", drawing(0.0, 0, 1.0, 0.0, 0), wide)
    yield Case(sample, "random", drawing(1.0, 0, 1.0, 0.0, RANDOM), wide)
    yield Case(sample, "min_p", drawing(1.0, 0, 1.0, 0.05, RANDOM | MIN_P), wide)
    yield Case(sample, "top_k 50", drawing(1.0, 50, 1.0, 0.0, RANDOM | TOP), wide)
    yield Case(sample, "top_p 0.9", drawing(0.7, 0, 0.9, 0.0, RANDOM | TOP), wide)
    yield Case(sample, "k, p, min_p", drawing(0.7, 50, 0.9, 0.02, RANDOM | TOP | MIN_P), wide)
    yield Case(sample, "flat top_p", drawing(50.0, 0, 0.9, 0.0, RANDOM | TOP), wide)
    table = draw_ids(SLOTS, 128)
    for most in (0, 5, 20):
        asked = (slots, slots, ints(SLOTS, value=most), ints(SLOTS), table, most)
        yield Case(gather_logprobs, f"top {most}", [(x, *asked) for x in logits], wide)


def check(case: Case) -> None:
    """The kernel's results on the first call's arguments equal the reference's, within f32 rounding."""
    mine, theirs = ([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in case.calls[0]] for _ in range(2))
    outcomes = case.op(*mine), case.op.reference(*theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, torch.Tensor) and not torch.allclose(a.float(), b.float(), 1e-4, 1e-4, equal_nan=True):
            raise ValueError(f"{case.op.name} {case.label}: argument {i} differs from the reference")
    if case.op is sample:
        differing = int((outcomes[0] != outcomes[1]).sum())
        if differing > max(1, len(outcomes[0]) // 50):  # ties within the rounding of log and exp
            raise ValueError(f"sample {case.label}: {differing} rows differ from the reference")
    elif case.op is gather_logprobs:
        for a, b in zip(*outcomes, strict=True):
            if not torch.allclose(a.float(), b.float(), 1e-4, 1e-4):
                raise ValueError(f"gather_logprobs {case.label} differs from the reference")


def cases(rows: int) -> Iterator[Case]:
    copies = max(1, cdiv(COLD_BYTES, 4 * rows * VOCAB))
    logits = [torch.randn(rows, VOCAB, device="cuda") * 3 for _ in range(min(copies, 40))]
    slots = torch.randperm(SLOTS, device="cuda")[:rows].int()
    yield from step_cases(rows)
    yield from draw_cases(rows, logits, slots)  # before the processors, which change the logits
    yield from processor_cases(rows, logits, slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--rows", default="1,8,64,256", help="row counts, separated by commas")
    options = parser.parse_args()
    rows = [int(part) for part in options.rows.split(",")]
    torch.manual_seed(0)
    lines: dict[str, list[str]] = {}
    for count in rows:
        for case in cases(count):
            if options.only in case.op.name:
                check(case)
                took = time_calls([partial(case.op, *call) for call in case.calls])
                floor = case.moved / BYTES_PER_US
                lines.setdefault(f"{case.op.name} {case.label}", []).append(f"{took:8.1f} {floor:7.1f}")
    print("microseconds, then the floor of the bytes moved")
    print(f"{'':30s}" + "".join(f"{f'N={count}':>18s}" for count in rows))
    for name, cells in lines.items():
        print(f"{name:30s}" + "".join(f"{cell:>18s}" for cell in cells))


if __name__ == "__main__":
    main()
