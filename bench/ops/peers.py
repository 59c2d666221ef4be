"""Attention over pages beside FlashInfer: decode rows and prompts, on the same caches.

    python -m bench.ops.peers [--only decode prompts] [--build] [--json FILE]

FlashInfer compiles its kernels with nvcc when they are first asked for; ``--build`` does that alone. Its plans, which it makes
on the host before a step, are not counted. ``ours`` is attention by itself, as theirs is; ``fused`` what the engine launches in
decode steps: head norms, rotation and the write of keys and values as well. All run in CUDA graphs and go through several
layers' caches, so that none lies in the L2 cache. Both give the same numbers, or the case says that they differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.ops.draft_attention import Case as Fused
from bench.ops.limits import FLOPS_PER_US
from bench.ops.timing import read_bytes_per_us, time_calls
from headway.core.ints import cdiv
from headway.kernels.paged_attention import paged_attention
from headway.kernels.testing import PagedInputs, make_paged_inputs

CACHE_BYTES = 200 << 20
"""What several layers' caches take together: more than the L2 cache."""
SCALE, BLOCK = 0.09, 16
CLOSE = 0.02
"""How far results may lie apart, of the largest number: both round to bfloat16 on the way."""
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of one size: heads of queries and of keys, numbers a head, and (tokens, context) of each row."""

    heads: tuple[int, int]
    size: int
    rows: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        spread = {context for _, context in self.rows}
        context = f"{min(spread)}" if len(spread) == 1 else f"{min(spread)} to {max(spread)}"
        return (
            f"{self.heads[0]} / {self.heads[1]} heads of {self.size}, {len(self.rows)} x {self.rows[0][0]} of {context}"
        )

    @property
    def bytes(self) -> float:
        """Keys and values read once, queries and results."""
        kept = sum(context for _, context in self.rows) * self.heads[1] * self.size * 4
        return kept + 4.0 * sum(tokens for tokens, _ in self.rows) * self.heads[0] * self.size

    @property
    def flops(self) -> float:
        """Two products of each query with each key that it sees."""
        pairs = sum(tokens * (context - (tokens - 1) / 2) for tokens, context in self.rows)
        return 4.0 * pairs * self.heads[0] * self.size


def decode_cases() -> Iterator[Case]:
    """Rows of one token."""
    for heads, size in (((16, 8), 128), ((32, 8), 128), ((32, 4), 128), ((12, 2), 128), ((32, 8), 64), ((4, 1), 256)):
        for number, context in ((1, 300), (8, 300), (64, 300), (256, 300), (64, 4096), (1, 32768)):
            yield Case(heads, size, ((1, context),) * number)
    mixed = tuple((1, 40 + 61 * (row % 33)) for row in range(256))
    yield Case((16, 8), 128, mixed)
    yield Case((32, 8), 128, mixed)


def prompt_cases() -> Iterator[Case]:
    """Prompts and chunks of prompts."""
    for heads, size in (((16, 8), 128), ((32, 8), 128), ((32, 8), 64)):
        for number, tokens, context in ((8, 1024, 1024), (64, 128, 128), (1, 8192, 8192), (4, 512, 8192)):
            yield Case(heads, size, ((tokens, context),) * number)


def inputs_of(case: Case, *, decode: bool) -> list[PagedInputs]:
    """One for each layer."""
    made: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.bfloat16, "device": "cuda", "on_device": True}
    first = make_paged_inputs(
        case.rows,
        num_decode_rows=len(case.rows) if decode else 0,
        heads=case.heads,
        size=case.size,
        heads_first=True,
        **made,
    )
    layers = max(1, min(12, cdiv(CACHE_BYTES, 2 * first.k_cache.nbytes)))
    more = [make_paged_inputs(
        case.rows, num_decode_rows=first.num_decode_rows, heads=case.heads, size=case.size, heads_first=True, **made
    ) for _ in range(layers - 1)]  # fmt: skip
    return [first, *more]


def ours(layers: list[PagedInputs]) -> list[Call]:
    """The engine's operation."""
    return [partial(paged_attention, *layer.arguments(SCALE)) for layer in layers]


def pages_of(case: Case, inputs: PagedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(starts, pages, tokens in the last page) of all rows, int32, as FlashInfer has them."""
    counts = torch.tensor([0, *(cdiv(context, BLOCK) for _, context in case.rows)], dtype=torch.int32)
    slots = inputs.row_slots.tolist()
    pages = torch.cat(
        [inputs.block_tables[slot, :count] for slot, count in zip(slots, counts[1:].tolist(), strict=True)]
    )
    last = torch.tensor([(context - 1) % BLOCK + 1 for _, context in case.rows], dtype=torch.int32)
    return counts.cumsum(0).to(torch.int32).to(pages.device), pages.contiguous(), last.to(pages.device)


def theirs(case: Case, layers: list[PagedInputs], *, decode: bool, **kind: Any) -> list[Call]:
    """FlashInfer's, planned for these rows: it goes through the layers with one plan, as an engine would."""
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    room = torch.zeros(384 << 20, dtype=torch.uint8, device="cuda")
    of_rows = (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper if decode else flashinfer.BatchPrefillWithPagedKVCacheWrapper
    )
    wrapper, first = of_rows(room, "HND", **kind), layers[0]
    sizes = (*case.heads, case.size, BLOCK)
    types: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": SCALE}
    if decode:
        plans = [pages_of(case, each) for each in layers]
        wrapper.plan(*plans[0], *sizes, **types)
    else:
        wrapper.plan(first.query_start, *pages_of(case, first), *sizes, causal=True, **types)
    return [
        partial(wrapper.run, each.q, (each.k_cache.transpose(1, 2), each.v_cache.transpose(1, 2))) for each in layers
    ]


def kinds(*, decode: bool) -> dict[str, dict[str, Any]]:
    """FlashInfer's kernels that serve on Hopper."""
    if decode:
        return {"plain": {"use_tensor_cores": False}, "cores": {"use_tensor_cores": True}}
    return {"fa3": {"backend": "fa3"}, "fa2": {"backend": "fa2"}}


def measure(case: Case, *, decode: bool, build: bool, speed: float) -> dict[str, Any]:
    """Microseconds of ours and of each of theirs."""
    layers = inputs_of(case, decode=decode)
    row: dict[str, Any] = {"case": str(case), "floor_us": max(case.bytes / speed, case.flops / FLOPS_PER_US)}
    mine = ours(layers)
    expected = mine[0]().float()
    row["ours"] = None if build else time_calls(mine, least=12)
    if decode and not build:
        lengths = [context for _, context in case.rows]
        fused = Fused((*case.heads, case.size, case.size), lengths, 1, torch.bfloat16, len(layers))
        row["fused"] = fused.time(fused.fused)
    for name, kind in kinds(decode=decode).items():
        try:
            calls = theirs(case, layers, decode=decode, **kind)
            apart = float((calls[0]().float() - expected).abs().max() / expected.abs().max())
            row[name] = None if build else time_calls(calls, least=12)
            if not apart <= CLOSE:
                row[name + " differs"] = apart
        except Exception as error:  # a kernel that this release has not, or that does not compile
            row[name + " failed"] = " ".join(str(error).split())[:200]
    return row


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("decode", "prompts"), default=["decode", "prompts"])
    parser.add_argument("--build", action="store_true", help="compile FlashInfer's kernels, and time nothing")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        sys.exit("this benchmark needs a CUDA device and the package flashinfer-python")
    speed, found = read_bytes_per_us(), []
    for only in asked.only:
        decode = only == "decode"
        cases = list(decode_cases() if decode else prompt_cases())
        for case in {(each.size, each.heads): each for each in cases}.values() if asked.build else cases:
            row = measure(case, decode=decode, build=asked.build, speed=speed)
            found.append({"op": only, **row})
            sys.stdout.write(
                " ".join(f"{k}: {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in row.items()) + "\n"
            )
            sys.stdout.flush()
    if asked.json:
        card = torch.cuda.get_device_name()
        report = {"card": card, "bytes_per_us": speed, "command": "python -m bench.ops.peers", "figures": found}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
