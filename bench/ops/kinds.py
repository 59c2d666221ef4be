"""Times kernels of attention's other kinds by themselves against their bytes and their arithmetic: latents, the sparse indexer,
and prompts of models with states.

    python -m bench.ops.kinds [--only mla_decode index_topk ...] [--quick] [--json FILE]

Shapes are DeepSeek-V2-Lite's and V3's (latents of 512 and 64), V3.2's (64 index heads of 128, 2,048 of the keys), and those of
the anchors gdn_08b and mamba2_780m. ``of bytes`` is the share of the card's bandwidth that the least of bytes makes, ``of
arithmetic`` the share of 790 TFLOP/s; recurrent rules count what token by token takes. FlashMLA and FlashInfer stand beside
``mla_decode`` where they can be imported. Decode steps of states: ``delta_states.py`` and ``ssd_decode.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ops.limits import FLOPS_PER_US
from bench.ops.timing import time_calls
from headway.cli.bench.anchors.command import card_name
from headway.cli.bench.anchors.floors import bandwidth
from headway.core.chunks import CHUNKS_AT, chunk_table
from headway.core.ints import cdiv
from headway.kernels.gated_delta import gated_delta
from headway.kernels.mla_decode import mla_decode
from headway.kernels.mla_index import index_scores, index_topk
from headway.kernels.mla_prefill import mla_prefill
from headway.kernels.ssd_scan import ssd_scan

RANK, ROTATED, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 64
ANY = 2**31 - 1
CACHE_BYTES = 200 << 20
"""What several calls read together, so that none finds its keys in the L2 cache."""


@dataclass(frozen=True)
class Case:
    """One size of an operation: how it is called, and the least that it moves and computes."""

    op: str
    name: str
    calls: list[Callable[[], Any]]
    bytes: float
    flops: float


@dataclass(frozen=True)
class Size:
    """Rows of a batch; the tokens that each brings, and all it has then."""

    rows: int
    queries: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.queries} of {self.context}"

    @property
    def pairs(self) -> float:
        """Queries times the keys that each sees."""
        return self.rows * self.queries * (self.context - (self.queries - 1) / 2)


def on(device: str) -> dict[str, Any]:
    """Where tensors lie, and of which dtype."""
    return {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}


def tables(size: Size, device: str) -> tuple[torch.Tensor, ...]:
    """(block tables, row slots, query starts, lengths): every row's blocks scattered."""
    blocks = cdiv(size.context, BLOCK)
    ints: dict[str, Any] = {"device": device, "dtype": torch.int32}
    table = (torch.randperm(size.rows * blocks, device=device).to(torch.int32) + 1).view(size.rows, blocks)
    starts = torch.arange(size.rows + 1, **ints) * size.queries
    return table, torch.arange(size.rows, **ints), starts, torch.full((size.rows,), size.context, **ints)


def caches(size: Size, width: int, device: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """[blocks, BLOCK, width] of several layers, together larger than the L2 cache."""
    blocks = size.rows * cdiv(size.context, BLOCK) + 1
    drawn = torch.randn(blocks, BLOCK, width, **on(device))
    kept = drawn if dtype is None else drawn.to(dtype)
    layers = max(1, min(8, cdiv(CACHE_BYTES, kept.numel() * kept.element_size()))) if device == "cuda" else 1
    return [kept, *(kept.clone() for _ in range(layers - 1))]


def mla_decode_cases(sizes: Sequence[Size], device: str) -> Iterator[Case]:
    """One or two tokens a row, heads of V2-Lite and of V3, latents in 16 and in 8 bits."""
    for heads in (16, 128):
        for size in sizes:
            tokens, made = size.rows * size.queries, on(device)
            q_latent, q = torch.randn(tokens, heads, RANK, **made), torch.randn(tokens, heads, NOPE + ROTATED, **made)
            lists = tables(size, device)
            for kept in (None, torch.float8_e4m3fn) if device == "cuda" else (None,):
                layers = caches(size, RANK + ROTATED, device, kept)
                calls: list[Callable[[], Any]] = [
                    partial(mla_decode, q_latent, q, each, *lists, None, 0.07, ANY, size.queries, size.context)
                    for each in layers
                ]
                read = size.rows * size.context * (RANK + ROTATED) * layers[0].element_size()
                read += (2 * q_latent.numel() + q.numel()) * q.element_size()
                flops = 2.0 * size.pairs * heads * (2 * RANK + ROTATED)
                name = f"{heads} heads, {size}" + ("" if kept is None else ", 8 bits")
                yield Case("mla_decode", name, calls, read, flops)
                if kept is None and size.queries == 1:
                    for label, call in peers(q_latent, q, layers, lists, size):
                        yield Case("mla_decode", f"{name}, {label}", call, read, flops)


def imported(name: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def peers(
    q_latent: torch.Tensor, q: torch.Tensor, layers: list[torch.Tensor], lists: tuple[torch.Tensor, ...], size: Size
) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """The same by others' kernels, as far as they are installed."""
    table, _, starts, lens = lists
    rotated, heads = q[..., -ROTATED:], q.shape[1]
    flash_mla, flashinfer = imported("flash_mla"), imported("flashinfer.mla")
    if flash_mla is not None:
        both = torch.cat([q_latent, rotated], dim=-1)[:, None]
        plan = flash_mla.get_mla_metadata(lens, heads, 1)
        yield (
            "FlashMLA",
            [
                partial(flash_mla.flash_mla_with_kvcache, both, each[:, :, None], table, lens, RANK, *plan, 0.07, True)
                for each in layers
            ],
        )
    if flashinfer is None:
        return
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=q.device))
    pages = torch.arange(size.rows + 1, dtype=torch.int32, device=q.device) * table.shape[1]
    kinds = (q.dtype, layers[0].dtype)
    wrapper.plan(starts, pages, table.flatten(), lens, heads, RANK, ROTATED, BLOCK, True, 0.07, *kinds)
    yield (
        "FlashInfer",
        [partial(wrapper.run, q_latent, rotated.contiguous(), each[..., :RANK], each[..., RANK:]) for each in layers],
    )


def mla_prefill_cases(sizes: Sequence[Size], device: str) -> Iterator[Case]:
    """Prompts' own tokens, keys and values made of latents."""
    for heads in (16, 128):
        for size in sizes:
            tokens, made = size.rows * size.queries, on(device)
            q, kv = torch.randn(tokens, heads, NOPE + ROTATED, **made), torch.randn(tokens, heads, NOPE + VALUE, **made)
            key, out = torch.randn(tokens, ROTATED, **made), torch.empty(tokens, heads, VALUE, **made)
            _, _, starts, lens = tables(size, device)
            call = partial(mla_prefill, q, kv, key, out, None, starts, lens, 0.07, -1, 0, 0)
            moved = sum(each.numel() * each.element_size() for each in (q, kv, key, out))
            flops = 2.0 * size.pairs * heads * (NOPE + ROTATED + VALUE)
            yield Case("mla_prefill", f"{heads} heads, {size}", [call], moved, flops)


def index_cases(
    sizes: Sequence[Size], device: str, heads: int = 64, width: int = 128, best: int = 2048
) -> Iterator[Case]:
    """Scores of all earlier keys, and the choice among them."""
    for size in sizes:
        tokens = size.rows * size.queries
        q, weights = torch.randn(tokens, heads, width, **on(device)), torch.randn(tokens, heads, **on(device))
        lists = tables(size, device)
        keys = caches(size, width, device)
        calls: list[Callable[[], Any]] = [
            partial(index_scores, q, weights, each, *lists, 0, 0.09, size.context) for each in keys
        ]
        moved = size.rows * size.context * width * q.element_size() + 4 * size.pairs
        yield Case("index_scores", str(size), calls, moved, 2.0 * size.pairs * heads * width)
        scores = torch.randn(tokens, size.context, device=device)
        own = torch.arange(size.context - size.queries, size.context, dtype=torch.int32, device=device)
        selected = torch.empty(tokens, best, dtype=torch.int32, device=device)
        call = partial(index_topk, scores, own.repeat(size.rows), selected)
        yield Case("index_topk", str(size), [call], 4 * size.pairs + 4 * tokens * best, 0.0)


def state_cases(sizes: Sequence[Size], device: str) -> Iterator[Case]:
    """Prompts of a gated delta net and of Mamba-2, chunk by chunk, from the beginning."""
    for size in sizes:
        tokens, made = size.rows * size.queries, on(device)
        wide: dict[str, Any] = {"device": device}
        _, slots, starts, lens = tables(size, device)
        table = chunk_table(np.full(size.rows, size.queries, np.int32))
        packed = torch.zeros(CHUNKS_AT + 2 + len(table), dtype=torch.int32)
        packed[CHUNKS_AT : CHUNKS_AT + 2] = torch.tensor([CHUNKS_AT + 2, len(table) // 2])
        packed[CHUNKS_AT + 2 :] = torch.from_numpy(table)
        step = starts, slots, lens, packed.to(device), len(table) // 2, size.queries, 1
        q, k = (torch.randn(tokens, 16, 128, **made) for _ in range(2))
        v, state = torch.randn(tokens, 32, 128, **made), torch.zeros(size.rows, 32, 128, 128, **wide)
        a, b = (torch.randn(tokens, 32, **made) for _ in range(2))
        rate, bias = torch.zeros(32, **wide), torch.randn(32, **wide)
        call = partial(gated_delta, q, k, v, a, rate, bias, b, 1.0, 128**-0.5, state, *step)
        moved = sum(each.numel() * each.element_size() for each in (q, k, v, v, a, b, state))
        yield Case("gated_delta", str(size), [call], moved, 6.0 * tokens * 32 * 128 * 128)
        x, dt, state = (
            torch.randn(tokens, 48, 64, **made),
            torch.randn(tokens, 48, **made),
            torch.zeros(size.rows, 48, 64, 128, **made),
        )
        b, c = (torch.randn(tokens, 1, 128, **made) for _ in range(2))
        rate, skip = -torch.rand(48, **wide), torch.randn(48, **wide)
        call = partial(ssd_scan, x, dt, bias.repeat(2)[:48], rate, b, c, skip, 0.0, float("inf"), state, *step)
        moved = sum(each.numel() * each.element_size() for each in (x, x, dt, b, c, state))
        yield Case("ssd_scan", str(size), [call], moved, 4.0 * tokens * 48 * 64 * 128)


DECODE = [Size(1, 1, 8192), Size(8, 1, 8192), Size(64, 1, 8192), Size(1, 1, 131072), Size(64, 4, 2048)]
PROMPTS = [Size(1, 8192, 8192), Size(8, 1024, 1024)]
CHOICES = [Size(1, 1, 32768), Size(64, 1, 8192), Size(1, 1024, 8192)]
QUICK = [Size(2, 1, 96), Size(1, 3, 70)]
OPS: dict[str, tuple[Callable[..., Iterator[Case]], list[Size]]] = {
    "mla_decode": (mla_decode_cases, DECODE),
    "mla_prefill": (mla_prefill_cases, PROMPTS),
    "index": (index_cases, CHOICES),
    "states": (state_cases, PROMPTS),
}


def spent_us(case: Case, device: str) -> float:
    """Microseconds of a call."""
    if device == "cuda":
        return time_calls(case.calls, least=8)
    best = float("inf")
    for _ in range(2):
        begun = time.perf_counter()
        case.calls[0]()
        best = min(best, time.perf_counter() - begun)
    return best * 1e6


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """See the module; gives a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.quick:
        sys.exit("these sizes are a GPU's; --quick runs small ones")
    card, found = card_name("auto"), []
    speed = bandwidth(card)
    print(f"{card}: {'bandwidth not known' if speed is None else f'{speed / 1e12:.2f} TB/s'}")
    for name in asked.only:
        cases, sizes = OPS[name]
        for case in cases(QUICK if asked.quick else sizes, device):
            us = spent_us(case, device)
            row: dict[str, Any] = {"op": case.op, "case": case.name, "us": us, "bytes": case.bytes, "flops": case.flops}
            row["bytes_share"] = None if speed is None else case.bytes / (us * speed / 1e6)
            row["flops_share"] = case.flops / us / FLOPS_PER_US
            found.append(row)
            of_bytes = "" if speed is None else f"{100 * row['bytes_share']:5.1f} % of bytes"
            print(
                f"{case.op:12} {case.name:44} {us:10.1f} us  {of_bytes} {100 * row['flops_share']:5.1f} % of arithmetic"
            )
            sys.stdout.flush()
    if asked.json:
        asked.json.write_text(json.dumps({"card": card, "figures": found}, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
