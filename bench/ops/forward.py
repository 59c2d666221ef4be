"""Times the forward kernels at the shapes of Qwen3-0.6B and Llama-3.1-8B and compares with what the card allows.

    python bench/ops/forward.py [--only attention] [--sweep]

Each figure is the mean over a CUDA graph of many calls, the best of several replays. The floor is the larger of bytes
moved over 4.44 TB/s and floating-point operations over 790 TFLOP/s, one H200's measured limits. Decode attention walks
over different rows from call to call, so that its keys come from memory and not from the L2 cache. Every case is first
compared with the op's reference; a wrong one prints no time. --sweep tries other attention tiles at a few shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from limits import BYTES_PER_US, FLOPS_PER_US
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.launch import launch_decode, launch_prefill
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import DecodeRows, DecodeTile, PrefillTile
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import PagedInputs, make_cos_sin, make_paged_inputs

HEADS_FIRST = True
"""Layout of the cache; ``CachePool``'s on CUDA."""
COLD_BYTES = 256 * 2**20
"""Decode attention's calls walk over at least this much cache: five times the L2."""
DECODE_CONTEXT, MAX_MODEL_LEN, BLOCK_SIZE = 512, 4096, 16
EPS = 1e-6
Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Shape:
    """A model's layer, as the ops see it."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    size: int
    qk_norm: bool


SHAPES = [Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, True), Shape("llama-8b", 4096, 14336, 32, 8, 128, False)]
DECODE_ROWS = [1, 8, 64, 256]
PREFILLS = [(1, 512), (64, 1024)]


@dataclass(frozen=True)
class Case:
    """One line of the table. ``calls`` are timed one after the other; ``check`` raises when the kernel is wrong."""

    op: str
    label: str
    calls: Calls
    moved: float
    flops: float
    check: Callable[[], None]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every error below 2 % of the largest value: among millions of bf16 elements some round the other way."""
    error, largest = (actual.float() - expected.float()).abs().max(), expected.float().abs().max()
    if not bool(error <= 0.02 * largest):
        raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def elementwise_cases(shape: Shape, tokens: int) -> list[Case]:
    label = f"{shape.name} T={tokens}"
    x, residual, weight = random(tokens, shape.hidden), random(tokens, shape.hidden), random(shape.hidden)
    few = slice(0, 512)  # rows compared with the reference

    def check_norms() -> None:
        assert_near(rms_norm(x, weight, EPS)[few], rms_norm.reference(x[few], weight, EPS))
        mine, theirs = residual.clone(), residual[few].clone()
        y = add_rms_norm(x, mine, weight, EPS)
        assert_near(y[few], add_rms_norm.reference(x[few], theirs, weight, EPS))
        assert_near(mine[few], theirs)

    gate_up = random(tokens, 2 * shape.intermediate)

    def check_silu() -> None:
        assert_near(silu_mul(gate_up)[few], silu_mul.reference(gate_up[few]))

    row_bytes = 2.0 * tokens * shape.hidden
    mlp_bytes = 6.0 * tokens * shape.intermediate
    # The residual grows over the calls of add_rms_norm; that takes no longer.
    return [
        Case("rms_norm", label, [lambda: rms_norm(x, weight, EPS)], 2 * row_bytes, 0, check_norms),
        Case("add_rms_norm", label, [lambda: add_rms_norm(x, residual, weight, EPS)], 4 * row_bytes, 0, check_norms),
        Case("silu_mul", label, [lambda: silu_mul(gate_up)], mlp_bytes, 0, check_silu),
    ]


def rope_cases(shape: Shape, tokens: int) -> list[Case]:
    num_blocks = cdiv(tokens, BLOCK_SIZE) + 1
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    caches = [torch.zeros(num_blocks, BLOCK_SIZE, shape.kv_heads, shape.size, dtype=torch.bfloat16, device="cuda")]
    caches.append(torch.zeros_like(caches[0]))
    qkv = random(tokens, width)
    positions = (torch.arange(tokens, device="cuda") % MAX_MODEL_LEN).int()
    table = make_cos_sin(MAX_MODEL_LEN, shape.size, "cuda")
    norms = [random(shape.size), random(shape.size)] if shape.qk_norm else [None, None]
    slots = torch.arange(tokens, device="cuda", dtype=torch.int32) + BLOCK_SIZE

    def call() -> torch.Tensor:
        return rope_kv_write(qkv, positions, table, *norms, EPS, slots, *caches, shape.heads)

    def check() -> None:
        theirs = [cache.clone() for cache in caches]
        expected = rope_kv_write.reference(qkv, positions, table, *norms, EPS, slots, *theirs, shape.heads)
        assert_near(call(), expected)
        for mine, other in zip(caches, theirs, strict=True):
            assert_near(mine, other)

    return [Case("rope_kv_write", f"{shape.name} T={tokens}", [call], 4.0 * tokens * width, 0, check)]


def paged(shape: Shape, rows: list[tuple[int, int]], num_decode_rows: int) -> PagedInputs:
    return make_paged_inputs(
        rows, num_decode_rows=num_decode_rows, heads=(shape.heads, shape.kv_heads), size=shape.size,
        bound=MAX_MODEL_LEN, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device="cuda", on_device=True,
        heads_first=HEADS_FIRST,
    )  # fmt: skip


def decode_inputs(shape: Shape, rows: int, context: int) -> list[PagedInputs]:
    """The same batch over different parts of a cache larger than the L2."""
    row_bytes = 4 * context * shape.kv_heads * shape.size
    sets = max(1, cdiv(COLD_BYTES, rows * row_bytes))
    whole = paged(shape, [(1, context)] * (rows * sets), rows)
    starts = whole.query_start[: rows + 1].contiguous()
    parts = []
    for first in range(0, rows * sets, rows):
        part = slice(first, first + rows)
        slots, lens = whole.row_slots[part].contiguous(), whole.seq_lens[part].contiguous()
        parts.append(replace(whole, q=whole.q[part].contiguous(), row_slots=slots, seq_lens=lens, query_start=starts))
    return parts


def check_attention(shape: Shape, inputs: PagedInputs) -> None:
    arguments = inputs.arguments(shape.size**-0.5)
    assert_near(paged_attention(*arguments), paged_attention.reference(*arguments))


def attend(inputs: PagedInputs, scale: float) -> torch.Tensor:
    return paged_attention(*inputs.arguments(scale))


def decode_case(shape: Shape, rows: int, context: int = DECODE_CONTEXT) -> Case:
    calls: Calls = [partial(attend, part, shape.size**-0.5) for part in decode_inputs(shape, rows, context)]
    moved = 4.0 * rows * shape.size * (context * shape.kv_heads + shape.heads)
    small = paged(shape, [(1, context)] * min(rows, 16), min(rows, 16))
    label = f"{shape.name} decode R={rows} L={context}"
    return Case("attention", label, calls, moved, 0, partial(check_attention, shape, small))


def prefill_case(shape: Shape, rows: int, length: int) -> Case:
    inputs = paged(shape, [(length, length)] * rows, 0)
    small = paged(shape, [(length, length)] * min(rows, 2), 0)
    tokens = float(rows * length)
    moved = 4 * tokens * shape.size * (shape.heads + shape.kv_heads)
    flops = 2 * tokens * (length + 1) * shape.heads * shape.size
    label = f"{shape.name} prefill {rows}x{length}"
    calls: Calls = [partial(attend, inputs, shape.size**-0.5)]
    return Case("attention", label, calls, moved, flops, partial(check_attention, shape, small))


def builders(only: str | None) -> Iterator[Callable[[], list[Case]]]:
    """One at a time, so that the tensors of one case are gone before the next."""
    for shape in SHAPES:
        for tokens in [*DECODE_ROWS, *(rows * length for rows, length in PREFILLS)]:
            if only in (None, "elementwise"):
                yield partial(elementwise_cases, shape, tokens)
            if only in (None, "rope"):
                yield partial(rope_cases, shape, tokens)
        if only in (None, "attention"):
            for rows, context in [*((rows, DECODE_CONTEXT) for rows in DECODE_ROWS), (1, MAX_MODEL_LEN)]:
                yield partial(lambda *case: [decode_case(*case)], shape, rows, context)
            for rows, length in PREFILLS:
                yield partial(lambda *case: [prefill_case(*case)], shape, rows, length)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report(case: Case) -> None:
    floor = max(case.moved / BYTES_PER_US, case.flops / FLOPS_PER_US)
    try:
        case.check()
        spent = time_calls(case.calls)
        rate = f"{case.flops / spent / 1e6:6.0f} TFLOP/s" if case.flops else f"{case.moved / spent / 1e6:6.2f} TB/s"
        say(f"{case.op:14s} {case.label:36s} {spent:10.2f} {floor:10.2f} {spent / floor:7.2f}  {rate}")
    except Exception as error:
        say(f"{case.op:14s} {case.label:36s} FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}")


PREFILL_TILES = [
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 3), (128, 32, 8, 4),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (128, 64, 4, 2),
]  # fmt: skip
DECODE_TILES = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 2, 4), (128, 8, 2), (128, 4, 2)]
RULE = ScoreRule(0.088)


def sweep() -> None:
    """Other tiles for the two shapes that matter most: long prefill and decode at 8, 64 and 256 rows."""
    shape = SHAPES[0]
    for rows, length in [(64, 1024), (1, 512), (4, 4096)]:
        inputs = paged(shape, [(length, length)] * rows, 0)
        tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
        out = torch.empty_like(inputs.q)
        flops = 2.0 * rows * length * (length + 1) * shape.heads * shape.size
        for m, n, warps, stages in PREFILL_TILES:
            tile = PrefillTile(m, n, shape.size, warps, stages, "tf32")
            label = f"prefill {rows}x{length} m={m} n={n} warps={warps} stages={stages}"
            caches = (inputs.q, inputs.k_cache, inputs.v_cache, out)
            attempt(label, flops / FLOPS_PER_US, [partial(launch_prefill, *caches, tables, RULE, DecodeRows(0), tile)])
    for rows in DECODE_ROWS:
        parts = decode_inputs(shape, rows, DECODE_CONTEXT)
        out = torch.empty_like(parts[0].q)
        moved = 4.0 * rows * shape.size * DECODE_CONTEXT * shape.kv_heads
        for n, warps, stages in DECODE_TILES:
            small = DecodeTile(16, n, shape.size, warps, stages, "tf32")
            calls: Calls = []
            for part in parts:
                rest = ((part.block_tables, part.row_slots, part.seq_lens), RULE, rows, MAX_MODEL_LEN, small)
                calls.append(partial(launch_decode, part.q, part.k_cache, part.v_cache, out, part.arrivals, *rest))
            attempt(f"decode R={rows} n={n} warps={warps} stages={stages}", moved / BYTES_PER_US, calls)


def attempt(label: str, floor: float, calls: Calls) -> None:
    try:
        spent = time_calls(calls)
        say(f"{label:52s} {spent:10.2f} {floor:10.2f} {spent / floor:7.2f}")
    except Exception as error:  # too much shared memory, for one
        say(f"{label:52s} FAILED {type(error).__name__}: {' '.join(str(error).split())[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["elementwise", "rope", "attention"], help="time these ops alone")
    parser.add_argument("--sweep", action="store_true", help="try other attention tiles instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    if options.sweep:
        sweep()
        return
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    say(f"{'op':14s} {'shape':36s} {'us':>10s} {'floor us':>10s} {'ratio':>7s}")
    for build in builders(options.only):
        for case in build():
            report(case)


if __name__ == "__main__":
    main()
