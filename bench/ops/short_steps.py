"""Steps of one prompt, or a few, of some hundred tokens: their attention, their products, and whole layers.

    python bench/ops/short_steps.py [--only attention products layers] [--tokens 512 1024] [--json FILE]

Every variant is first compared with the separate, general kernels. ``attention`` pads rows to 16, as the steps' graphs do.
``layers`` runs eight layers with their own weights, as the engine would: which ops of ``wide_linear`` each way uses is in its
name. Figures are microseconds, the best of several replays of a CUDA graph; of ``layers``, for each layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import time_calls

from headway.kernels.capability import num_sms
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper.overlap import SHORT, launch_overlapped, launch_short
from headway.kernels.paged_attention.launch import launch_prefill
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import DecodeRows, prefill_tile
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import PagedInputs, make_cos_sin, make_paged_inputs
from headway.kernels.wide_linear import wide_add, wide_gate_up, wide_qkv
from headway.kernels.wide_linear.hopper.launch import launch_gate_up, launch_qkv

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, LAYERS = 16, 8, 128, 1024, 3072, 8
"""Of Qwen3-0.6B, but for the layers."""
EPS, BLOCK_SIZE, ROWS, SCALE, CONTEXT = 1e-6, 16, 16, SIZE**-0.5, 8192
Rows = list[tuple[int, int]]
BATCHES: list[Rows] = [
    [(128, 128)], [(256, 256)], [(512, 512)], [(768, 768)], [(1024, 1024)], [(1536, 1536)], [(2048, 2048)], [(512, 4096)],
    [(128, 128)] * 4, [(256, 256)] * 4, [(512, 512)] * 2, [(512, 512)] * 4, [(1, 500)] * 12 + [(512, 512)],
    [(100 + 37 * (i % 8), 100 + 37 * (i % 8) + 160 * (i % 5)) for i in range(16)], [(1024, 1024)] * 4, [(1024, 1024)] * 8,
]  # fmt: skip
WAYS = {"separate": "", "gate_up": "g", "qkv": "q", "gate_up, qkv": "gq", "gate_up, qkv, add": "gqa"}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Report:
    """Figures as they come; what fails is named and the rest goes on."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self.failures = 0

    def add(self, group: str, case: str, what: str, us: float) -> None:
        self.figures.append({"group": group, "case": case, "what": what, "us": us})
        say(f"{group:10s} {case:26s} {what:40s} {us:8.2f} us")

    @contextmanager
    def guard(self, label: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures += 1
            say(f"FAILED {label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Two roundings of the same sums: every element within 5 % of the largest value."""
    error, largest = float((found.float() - expected.float()).abs().max()), float(expected.float().abs().max())
    if not error <= 0.05 * largest:
        raise ValueError(f"error {error:.3g} at values up to {largest:.3g}")


def paged(rows: Rows) -> PagedInputs:
    return make_paged_inputs(
        rows, num_decode_rows=0, heads=(HEADS, KV_HEADS), size=SIZE, block_size=BLOCK_SIZE, dtype=torch.bfloat16,
        device="cuda", on_device=True, heads_first=True, pad_rows=max(0, ROWS - len(rows)), bound=CONTEXT,
    )  # fmt: skip


def attention(report: Report, _: list[int]) -> None:
    """The general kernel, short tiles, and programs that stay (whose grid the padded rows would make long: without them)."""
    for rows in BATCHES:
        inputs, most = paged(rows), max(rows)[0]
        tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
        tensors = (inputs.q, inputs.k_cache, inputs.v_cache)
        few = (tables[0], inputs.row_slots[: len(rows)], inputs.query_start[: len(rows) + 1], inputs.seq_lens)
        tile = prefill_tile(SIZE, HEADS, KV_HEADS, inputs.q.dtype, len(inputs.q), num_sms(inputs.q.device), 2)

        def general(out: torch.Tensor, tensors: Any = tensors, tables: Any = tables, tile: Any = tile) -> None:
            launch_prefill(*tensors, out, tables, ScoreRule(SCALE), DecodeRows(0), tile)

        def short(out: torch.Tensor, stages: int, tensors: Any = tensors, tables: Any = tables) -> None:
            launch_short(*tensors, out, tables, SCALE, DecodeRows(0), stages)

        def stays(out: torch.Tensor, tensors: Any = tensors, used: Any = (few, inputs.arrivals, most)) -> None:
            tables, arrivals, most = used
            launch_overlapped(*tensors, out, tables, arrivals, SCALE, DecodeRows(0), most, SHORT)

        calls: dict[str, Callable[[torch.Tensor], None]] = {"general": general, "stays, rows not padded": stays}
        calls |= {f"short, {stages} stages": partial(short, stages=stages) for stages in (2, 3, 4)}
        truth = torch.full_like(inputs.q, float("nan"))
        general(truth)
        case = f"{len(rows)} rows, {rows[-1][0]} of {rows[-1][1]}"
        for name, call in calls.items():
            with report.guard(f"{case} {name}"):
                out = torch.full_like(inputs.q, float("nan"))
                call(out)
                agree(out, truth)
                report.add("attention", case, name, time_calls([partial(call, out)]))


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * columns**-0.5


def products(report: Report, counts: list[int]) -> None:
    """Each product alone, weights cold: by cuBLAS, with the kernel behind it, and as one."""
    shapes = {"qkv": (4096, HIDDEN), "out": (HIDDEN, 2048), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for tokens in counts:
        for name, (outputs, inputs) in shapes.items():
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
            weights = [weight(outputs, inputs) for _ in range(16)]
            ways: dict[str, Callable[[torch.Tensor], Any]] = {"F.linear": partial(F.linear, x)}
            residual, norm = torch.randn(tokens, outputs, dtype=x.dtype, device="cuda"), torch.ones_like(x[0, :HIDDEN])
            if name in ("out", "down"):
                ways["add, norm"] = lambda w, x=x, r=residual, n=norm: add_rms_norm(F.linear(x, w), r, n, EPS)
                ways["wide_add, norm"] = lambda w, x=x, r=residual, n=norm: rms_norm(wide_add(x, w, r) or r, n, EPS)
            if name == "gate_up":
                out = torch.empty(tokens, INNER, dtype=x.dtype, device="cuda")
                ways["silu"] = lambda w, x=x: silu_mul(F.linear(x, w))
                for wide in (256, 192, 128):
                    ways[f"one, {wide} wide"] = lambda w, x=x, out=out, wide=wide: launch_gate_up(x, w, out, 16, wide)
            if name == "qkv":
                rest = Chain(tokens).rest()
                ways["rope"] = lambda w, x=x, rest=rest: rope_kv_write(F.linear(x, w), *rest)
                for wide in (256, 128):
                    ways[f"one, {wide} wide"] = lambda w, x=x, rest=rest, wide=wide: launch_qkv(x, w, *rest, wide=wide)
            for what, call in ways.items():
                with report.guard(f"{name} {tokens} {what}"):
                    report.add(name, f"{tokens} tokens", what, time_calls([partial(call, w) for w in weights]))


class Chain:
    """Layers over a step of one prompt of ``tokens`` tokens."""

    def __init__(self, tokens: int) -> None:
        self.inputs = paged([(tokens, tokens)])
        self.positions = torch.arange(tokens, device="cuda").int()
        blocks = self.inputs.block_tables[self.inputs.row_slots[0].long(), self.positions.long() // BLOCK_SIZE]
        self.kv_slots = (blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE).int()
        self.cos_sin = make_cos_sin(CONTEXT, SIZE, "cuda")
        self.first = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.weights = [
            (weight((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), weight(HIDDEN, HEADS * SIZE), weight(2 * INNER, HIDDEN),
             weight(HIDDEN, INNER)) for _ in range(LAYERS)
        ]  # fmt: skip
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.head_norm = torch.ones(SIZE, dtype=torch.bfloat16, device="cuda")

    def add(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, wide: bool) -> torch.Tensor:
        if not wide:
            return add_rms_norm(F.linear(x, weight), residual, self.norm, EPS)
        wide_add(x, weight, residual)
        return rms_norm(residual, self.norm, EPS)

    def rest(self) -> tuple[Any, ...]:
        """What follows the product of queries, keys and values."""
        norm, caches = self.head_norm, (self.inputs.k_cache, self.inputs.v_cache)
        return self.positions, self.cos_sin, norm, norm, EPS, self.kv_slots, *caches, HEADS

    def run(self, way: str, general: bool = False) -> torch.Tensor:
        """All layers; the last norm."""
        inputs, residual, rest = self.inputs, self.first.clone(), self.rest()
        x = rms_norm(residual, self.norm, EPS)
        for qkv, out, up, down in self.weights:
            q = wide_qkv(x, qkv, *rest) if "q" in way else rope_kv_write(F.linear(x, qkv), *rest)
            if general:
                heads = torch.empty_like(q)
                tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
                launch_prefill(q, inputs.k_cache, inputs.v_cache, heads, tables, ScoreRule(SCALE), DecodeRows(0))
            else:
                heads = paged_attention(q, *inputs.arguments(SCALE)[1:])
            x = self.add(heads.flatten(1), out, residual, "a" in way)
            inner = wide_gate_up(x, up) if "g" in way else silu_mul(F.linear(x, up))
            x = self.add(inner, down, residual, "a" in way)
        return x


def layers(report: Report, counts: list[int]) -> None:
    """Whole layers."""
    for tokens in counts:
        chain = Chain(tokens)
        with torch.inference_mode():
            expected = chain.run("", True)
            ways = {"separate, general attention": ("", True), **{name: (way, False) for name, way in WAYS.items()}}
            for name, (way, general) in ways.items():
                with report.guard(f"layers {tokens} {name}"):
                    agree(chain.run(way, general), expected)
                    spent = time_calls([partial(chain.run, way, general)], least=3, replays=8)
                    report.add("layers", f"{tokens} tokens", name, spent / LAYERS)


GROUPS = {"attention": attention, "layers": layers, "products": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[384, 512, 768, 1024, 1536, 2048])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report()
    for name in options.only:
        with report.guard(name):
            GROUPS[name](report, options.tokens)
        if options.json:
            options.json.write_text(json.dumps(report.figures, indent=1))
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
