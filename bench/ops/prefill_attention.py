"""Prefill attention on one card: every variant against the reference, then against the clock and against torch's own.

    python bench/ops/prefill_attention.py [--variants NAME ...] [--check] [--time] [--yardsticks] [--json FILE]

Figures are the mean over a CUDA graph of many calls, the best of several replays. Floors count 790 TFLOP/s. The yardsticks
are ``F.scaled_dot_product_attention`` with one backend each, on contiguous tensors of the same shapes: they read no pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from limits import FLOPS_PER_US
from timing import time_calls
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper.overlap import OverlapTile, launch_overlapped
from headway.kernels.paged_attention.tiles import DecodeRows
from headway.kernels.testing import PagedInputs, assert_close, make_paged_inputs

Rows = list[tuple[int, int]]
VARIANTS = {
    "64 keys, queries kept": OverlapTile(64, 4, True),
    "64 keys": OverlapTile(64, 4, False),
    "128 keys": OverlapTile(128, 2, False),
}
CHECKS: list[tuple[str, Rows, tuple[int, int], int, dict[str, Any]]] = [
    ("one small row", [(1, 1)], (16, 8), 128, {}),
    ("one row", [(640, 640)], (16, 8), 128, {}),
    ("prompts", [(300, 300), (1, 1), (64, 64), (65, 65), (0, 0), (128, 128), (511, 511)], (16, 8), 128,
     {"pad_rows": 3, "pad_tokens": 700, "bound": 2048}),
    ("chunks", [(1, 70), (1, 0), (1, 301), (100, 357), (33, 1033), (5, 0), (129, 640), (2, 260)], (16, 8), 128,
     {"num_decode_rows": 3, "pad_rows": 3, "pad_tokens": 700, "bound": 2048}),
    ("four heads", [(300, 300), (1, 1), (64, 64), (100, 357), (33, 1033), (129, 640)], (32, 8), 128, {}),
    ("size 64", [(300, 300), (1, 1), (64, 64), (100, 357), (33, 1033)], (8, 8), 64, {"block_size": 8}),
    ("size 64, large blocks", [(300, 300), (1, 1), (64, 64), (100, 357), (33, 1033)], (8, 2), 64, {"block_size": 256}),
    ("many", [(1024, 1024)] * 5 + [(777, 1900), (1500, 1500)], (16, 8), 128, {}),
]  # fmt: skip
SHAPES = {"qwen3-0.6b": (16, 8), "llama-8b": (32, 8)}
TIMES: list[tuple[str, Rows, int]] = [
    ("qwen3-0.6b", [(1024, 1024)] * 8, 16),
    ("qwen3-0.6b", [(1024, 1024)] * 8, 128),
    ("llama-8b", [(8192, 8192)], 16),
    ("llama-8b", [(8192, 8192)], 128),
    ("llama-8b", [(1024, 1024)] * 8, 16),
    ("qwen3-0.6b", [(1024, 2048)] * 8, 16),
    ("qwen3-0.6b", [(128, 128)] * 64, 16),
    ("qwen3-0.6b", [(100 + 37 * (i % 8), 100 + 37 * (i % 8) + 160 * (i % 5)) for i in range(35)], 16),
]
"""Model, rows, block size."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def paged(rows: Rows, heads: tuple[int, int], size: int = 128, **changes: Any) -> PagedInputs:
    settings: dict[str, Any] = {"num_decode_rows": 0, "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    return make_paged_inputs(rows, heads=heads, size=size, **{**settings, "heads_first": True, **changes})


def launch(inputs: PagedInputs, tile: Any, scale: float, out: torch.Tensor) -> None:
    tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
    tensors, first = (inputs.q, inputs.k_cache, inputs.v_cache), DecodeRows(inputs.num_decode_rows)
    launch_overlapped(*tensors, out, tables, inputs.arrivals, scale, first, inputs.max_query_len, tile)


def check(name: str, tile: Any) -> bool:
    """Every shape against the reference, twice, over NaN."""
    good = True
    for label, rows, heads, size, changes in CHECKS:
        inputs = paged(rows, heads, size, **changes)
        first = inputs.num_decode_rows
        expected = paged_attention.reference(*inputs.arguments(0.09))[first:].cpu()
        outs = []
        for _ in range(3):
            out = torch.full_like(inputs.q, float("nan"))
            launch(inputs, tile, 0.09, out)
            torch.cuda.synchronize()
            outs.append(out[first:].cpu())
        try:
            assert_close(outs[0], expected)
            assert all(torch.equal(outs[0], other) for other in outs[1:]), "results move"
            assert bool(out[:first].isnan().all()), "wrote decode rows"
        except AssertionError as error:
            good = False
            bad = (outs[0].float() - expected.float()).abs()
            bad = torch.where(bad.isnan(), torch.full_like(bad, 1e9), bad).amax((1, 2))
            where = (bad > 0.05).nonzero().flatten().tolist()
            say(f"WRONG {name}, {label}: {' '.join(str(error).split())[:200]}; tokens {where[:8]} of {len(bad)}")
    say(f"checked {name}: {'good' if good else 'WRONG'}")
    return good


def floor(rows: Rows, heads: int, size: int = 128) -> float:
    return 4 * sum(n * (context - n) + n * (n + 1) / 2 for n, context in rows) * heads * size / FLOPS_PER_US


def case_name(model: str, rows: Rows) -> str:
    return f"{model} {len(rows)} x {rows[0][0]} of {rows[0][1]}"


def time_variants(names: list[str], figures: list[dict[str, Any]]) -> None:
    for model, rows, block_size in TIMES:
        inputs = paged(rows, SHAPES[model], on_device=True, block_size=block_size)
        out = torch.empty_like(inputs.q)
        for name in names:
            case = case_name(model, rows) + ("" if block_size == 16 else f", blocks of {block_size}")
            try:
                spent = time_calls([partial(launch, inputs, VARIANTS[name], 0.09, out)], least=10)
            except Exception as error:
                say(f"FAILED {name} {case}: {' '.join(str(error).split())[:300]}")
                continue
            note(figures, case, name, spent, floor(rows, SHAPES[model][0]))


def note(figures: list[dict[str, Any]], case: str, name: str, spent: float, least: float) -> None:
    figures.append({"case": case, "variant": name, "us": spent, "floor_us": least})
    say(f"{case:46s} {name:28s} {spent:9.1f} us {100 * least / spent:5.1f} %")


def yardsticks(figures: list[dict[str, Any]]) -> None:
    """Torch's kernels on contiguous tensors, keys and values with their own heads where the backend allows it."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for model, rows, _ in TIMES:
        heads, kv_heads = SHAPES[model]
        if len(set(rows)) > 1 or rows[0][0] != rows[0][1]:
            continue
        number, length = len(rows), rows[0][0]
        q = torch.randn(number, heads, length, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(number, kv_heads, length, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for name, backend in backends.items():
            for grouped in (True, False):
                keys, values = (k, v) if grouped else (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
                call = partial(F.scaled_dot_product_attention, q, keys, values, is_causal=True, enable_gqa=grouped)
                label = f"torch {name}" + ("" if grouped else ", keys repeated")
                try:
                    with sdpa_kernel(backend):
                        spent = time_calls([call], least=10)
                except Exception as error:
                    say(f"FAILED {label} {case_name(model, rows)}: {' '.join(str(error).split())[:200]}")
                    continue
                note(figures, case_name(model, rows), label, spent, floor(rows, heads))
    for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
        try:
            __import__(name)
            say(f"{name} is importable")
        except Exception as error:
            say(f"{name}: {type(error).__name__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--yardsticks", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    figures: list[dict[str, Any]] = []
    if options.check:
        for name in options.variants:
            check(name, VARIANTS[name])
    if options.time:
        time_variants(options.variants, figures)
    if options.yardsticks:
        yardsticks(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
