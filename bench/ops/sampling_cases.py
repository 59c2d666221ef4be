"""The cases of ``sampling.py``: inputs for each step and sampling operation, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from headway.core.ints import cdiv
from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.apply_edits import apply_edits
from headway.kernels.bad_words import bad_words
from headway.kernels.count_tokens import count_tokens
from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.logit_bias import logit_bias
from headway.kernels.min_tokens import min_tokens
from headway.kernels.registry import Op
from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, sample
from headway.kernels.sample.tiles import FILTERED, SampleTile
from headway.kernels.sample.triton import sample_with
from headway.kernels.slot_advance import slot_advance
from headway.kernels.step_unpack import step_unpack

LENGTH, SLOTS, STOPS, BLOCK_SIZE = 4096, 256, 80, 16
COLD_BYTES = 128 * 2**20
"""Logits are walked over at least this much memory: more than twice the L2."""


@dataclass(frozen=True)
class Size:
    """How many rows of how many logits."""

    rows: int
    vocab: int


@dataclass(frozen=True)
class Case:
    """One cell of the table: an operation's calls (timed one after the other) and the bytes one must move."""

    op: Op
    label: str
    calls: list[tuple[Any, ...]]
    moved: float
    tile: SampleTile | None = None

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.label}"

    @property
    def function(self) -> Callable[..., Any]:
        return partial(sample_with, self.tile) if self.tile else self.op

    @property
    def runs(self) -> list[Callable[[], Any]]:
        return [partial(self.function, *call) for call in self.calls]


def ints(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32, device="cuda")


def floats(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, device="cuda")


def draw_ids(*shape: int, high: int) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32, device="cuda")


def packed_decode(rows: int) -> torch.Tensor:
    """A packed step of ``rows`` decode rows and as many one-value edits."""
    records = [number for row in range(rows) for number in (row, 1, row, 1)]
    at = 16 + len(records)
    edits = [number for row in range(rows) for number in (row * 3, 16 + row, 1)]
    return torch.tensor([rows, at, rows, rows, 16, 1] + [0] * 10 + records + edits, dtype=torch.int32, device="cuda")


def step_cases(size: Size) -> Iterator[Case]:
    """The operations on the slot tables, whose bytes are few: their floor is a launch."""
    rows, vocab = size.rows, size.vocab
    packed, slots = packed_decode(rows), torch.arange(rows, dtype=torch.int32, device="cuda")
    history, counts = draw_ids(SLOTS, LENGTH, high=vocab), torch.zeros(SLOTS, vocab, dtype=torch.int16, device="cuda")
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
    for length in (512, LENGTH):
        long = ints(SLOTS, value=length)
        moved = rows * (2.0 * vocab + 4 * length)
        yield Case(count_tokens, f"{length} tokens", [(counts, slots, history, long // 2, long, LENGTH)], moved)


def processor_cases(size: Size, logits: list[torch.Tensor], slots: torch.Tensor) -> Iterator[Case]:
    """The logits processors with every row using the feature, and some with none."""
    rows, vocab = size.rows, size.vocab
    wide = 4.0 * rows * vocab
    on, off, known = ints(SLOTS, value=1), ints(SLOTS), ints(SLOTS, value=512)
    history = draw_ids(SLOTS, LENGTH, high=vocab)
    ids = torch.arange(1024, device="cuda").int().repeat(SLOTS, 1)
    bias = (slots, ints(SLOTS, value=300), ids, floats(SLOTS, 1024))
    yield Case(logit_bias, "300 ids", [(x, *bias) for x in logits], rows * 300.0 * 16)
    bits = draw_ids(SLOTS, cdiv(vocab, 32), high=2**31 - 1)
    yield Case(allowed_tokens, "half", [(x, slots, on, bits) for x in logits], 2 * wide + wide / 32)
    yield Case(allowed_tokens, "off", [(x, slots, off, bits) for x in logits], 0)
    stops = (known, known + 1, ints(SLOTS, 2, value=STOPS), draw_ids(SLOTS, STOPS, high=vocab))
    yield Case(min_tokens, "", [(x, slots, *stops) for x in logits], rows * STOPS * 8.0)
    offsets = (torch.arange(257, device="cuda") * 3).int().repeat(SLOTS, 1)
    words = (history, known, known // 2, ints(SLOTS, value=256), offsets, draw_ids(SLOTS, 2048, high=vocab))
    yield Case(bad_words, "256 phrases", [(x, slots, *words) for x in logits], rows * 256 * 16.0)


@dataclass(frozen=True)
class Draw:
    """Sampling numbers that every row of a case has."""

    label: str
    flags: int
    heat: float = 1.0
    k: int = 0
    p: float = 1.0
    low: float = 0.0

    def calls(self, logits: list[torch.Tensor], slots: torch.Tensor) -> list[tuple[Any, ...]]:
        tables = (
            floats(SLOTS, value=self.heat),
            ints(SLOTS, value=self.k),
            floats(SLOTS, value=self.p),
            floats(SLOTS, value=self.low),
        )
        seeds = torch.stack((torch.arange(SLOTS), torch.zeros(SLOTS)), 1).int().cuda()
        counts = torch.where(torch.rand(SLOTS, logits[0].shape[1], device="cuda") < 0.01, 1, 0).short()
        on = ints(SLOTS, value=int(bool(self.flags & PENALTIES)))
        rates = (floats(SLOTS, value=1.1), floats(SLOTS, value=0.1), floats(SLOTS, value=0.1))
        known = ints(SLOTS, value=512)
        return [(x, slots, *tables, seeds, known, counts, on, *rates, self.flags) for x in logits]


GREEDY, PLAIN = Draw("greedy", 0, heat=0.0), Draw("random", RANDOM)
PENALISED = Draw("greedy, 1 % penalised", PENALTIES, heat=0.0)
ALL = RANDOM | TOP | MIN_P | WIDE | TWICE
TOP_P = Draw("top_p 0.9", RANDOM | TOP | WIDE, heat=0.7, p=0.9)
TOP_K_TOP_P = Draw("k 50, p 0.9", RANDOM | TOP, heat=0.7, k=50, p=0.9)
DRAWS = (
    GREEDY,
    PLAIN,
    PENALISED,
    Draw("random, filters off", RANDOM | TOP | MIN_P),
    Draw("random, wide filters off", RANDOM | TOP | MIN_P | WIDE | TWICE),
    Draw("min_p", RANDOM | MIN_P | WIDE, low=0.05),
    Draw("top_k 50", RANDOM | TOP, k=50),
    Draw("top_k 500", RANDOM | TOP, k=500),
    Draw("top_k 5000", RANDOM | TOP | WIDE, k=5000),
    Draw("top_p 0.3", RANDOM | TOP | WIDE, heat=0.3, p=0.3),
    TOP_P,
    Draw("top_p 0.99", RANDOM | TOP | WIDE, heat=0.7, p=0.99),
    TOP_K_TOP_P,
    Draw("k, p: wide filters on", ALL, heat=0.7, k=50, p=0.9),
    Draw("k 5000, p 0.9", ALL, heat=0.7, k=5000, p=0.9),
    Draw("k, p, min_p", RANDOM | TOP | MIN_P, heat=0.7, k=50, p=0.9, low=0.02),
    Draw("flat top_p", RANDOM | TOP | WIDE, heat=50.0, p=0.9),
    Draw("flat min_p", RANDOM | MIN_P | WIDE, heat=50.0, low=0.9),
)


def draw_cases(size: Size, logits: list[torch.Tensor], slots: torch.Tensor) -> Iterator[Case]:
    """``sample`` with and without filters, on peaked and on flat rows, and ``gather_logprobs``."""
    wide = 4.0 * size.rows * size.vocab
    half = [x.bfloat16() for x in logits]
    for draw in DRAWS:
        yield Case(sample, draw.label, draw.calls(logits, slots), wide)
    for draw in (GREEDY, PLAIN, PENALISED, TOP_K_TOP_P):
        yield Case(sample, f"{draw.label}, bf16", draw.calls(half, slots), wide / 2)
    table = draw_ids(SLOTS, 128, high=size.vocab)
    for most in (0, 5, 20):
        asked = (slots, slots, ints(SLOTS, value=most), ints(SLOTS), table, most)
        yield Case(gather_logprobs, f"top {most}", [(x, *asked) for x in logits], wide)
        yield Case(gather_logprobs, f"top {most}, bf16", [(x, *asked) for x in half], wide / 2)


RACE_TILES = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)]
FINISH_TILES = {
    "pivots 8": replace(FILTERED, pivots=8),
    "gather 4096": replace(FILTERED, gather=4096),
    "gather 1024": replace(FILTERED, gather=1024),
    "4 warps": replace(FILTERED, finish_warps=4),
}
WIDE_TILES = {
    "segment 2048": replace(FILTERED, segment=2048),
    "segment 8192": replace(FILTERED, segment=8192),
    "4 pivots": replace(FILTERED, wide_pivots=4, levels=4),
    "16 pivots": replace(FILTERED, wide_pivots=16, levels=2),
    "2 levels": replace(FILTERED, levels=2),
    "4 levels": replace(FILTERED, levels=4),
}


def sweep(size: Size) -> list[Case]:
    """``sample`` with other tiles, on bf16 logits as models make them."""
    logits, slots = inputs(size)
    half, wide = [x.bfloat16() for x in logits], 2.0 * size.rows * size.vocab
    found = []
    for draw in (GREEDY, PLAIN):
        for block, warps in RACE_TILES:
            tile = SampleTile(block=block, num_warps=warps)
            found.append(Case(sample, f"{draw.label} {block}/{warps}", draw.calls(half, slots), wide, tile))
    for label, tile in {"as is": FILTERED, **FINISH_TILES}.items():
        found.append(Case(sample, f"k, p: {label}", TOP_K_TOP_P.calls(half, slots), wide, tile))
    for label, tile in {"as is": FILTERED, **WIDE_TILES}.items():
        found.append(Case(sample, f"top_p 0.9: {label}", TOP_P.calls(half, slots), wide, tile))
    return found


def check(case: Case) -> str:
    """What differs from the reference on the first call's arguments; empty: nothing beyond f32 rounding."""
    mine, theirs = ([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in case.calls[0]] for _ in range(2))
    outcomes = case.function(*mine), case.op.reference(*theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, torch.Tensor) and not torch.allclose(a.float(), b.float(), 1e-4, 1e-4, equal_nan=True):
            return f"argument {i}"
    if case.op is sample:
        differing = int((outcomes[0] != outcomes[1]).sum())
        if differing > max(1, len(outcomes[0]) // 50):  # ties within the rounding of log and exp
            return f"{differing} rows"
    elif case.op is gather_logprobs:
        for i, (a, b) in enumerate(zip(*outcomes, strict=True)):
            if not torch.allclose(a.float(), b.float(), 1e-4, 1e-4):
                return f"result {i}"
    return ""


def inputs(size: Size) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Several copies of the logits, and the rows' slots."""
    copies = max(1, cdiv(COLD_BYTES, 4 * size.rows * size.vocab))
    logits = [torch.randn(size.rows, size.vocab, device="cuda") * 3 for _ in range(min(copies, 40))]
    return logits, torch.randperm(SLOTS, device="cuda")[: size.rows].int()


def cases(size: Size) -> Iterator[Case]:
    """All operations; the processors last, since they change the logits."""
    logits, slots = inputs(size)
    yield from step_cases(size)
    yield from draw_cases(size, logits, slots)
    yield from processor_cases(size, logits, slots)
