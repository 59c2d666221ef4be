"""``dense_attention`` by Hopper's kernel, by the plain one and by torch: results first, then times.

    PYTHONPATH=. python bench/ops/dense_attention.py [--tokens 8192] [--json FILE]

``short`` is the best of several graphs, ``hot`` the mean over a longer time, with the card's clock where its power holds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from wide_gelu import best_of_two, say

from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_attention.hopper.launch import launch_overlapped

SIZE = 64
CASES = [(12, 510), (12, 256), (12, 128), (12, 64), (12, 32), (12, 0), (16, 384)]
"""(heads, tokens of a row; 0: of all lengths up to 510). The last is held out: nothing is chosen by it."""


def rows_of(tokens: int, length: int) -> list[int]:
    """Lengths of rows, together as many tokens as fit."""
    if length:
        return [length] * (tokens // length)
    generator = torch.Generator().manual_seed(1)
    found: list[int] = []
    while True:
        found.append(int(torch.randint(1, 511, (1,), generator=generator)))
        if sum(found) > tokens:
            return found[:-1]


def plainly(*arguments: Any) -> torch.Tensor:
    """The op without Hopper's kernel."""
    with patch("headway.kernels.dense_attention.triton.SHORT", sys.maxsize):
        found: torch.Tensor = dense_attention(*arguments)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.06, help="of each of two long measurements")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    found, wrong = [], False
    for heads, length in CASES:
        lengths = rows_of(options.tokens, length)
        tokens, longest = sum(lengths), max(lengths)
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        qkv = torch.randn(options.tokens, 3 * heads * SIZE, dtype=torch.bfloat16, device="cuda")
        qkv[tokens:] = torch.nan
        out = torch.empty(options.tokens, heads * SIZE, dtype=qkv.dtype, device="cuda")
        numbers = (heads, heads, SIZE**-0.5)
        calls: dict[str, Callable[[], Any]] = {
            "plain": partial(plainly, qkv, starts, None, *numbers, -1, 0.0, longest),
            "overlapped": partial(launch_overlapped, qkv, starts, out, *numbers, longest),
        }
        expected = dense_attention.reference(qkv[:tokens], starts, None, *numbers, -1, 0.0, longest).float()
        calls["overlapped"]()
        for name, result in (("overlapped", out), ("plain", calls["plain"]())):
            off = float((result[:tokens].float() - expected).abs().max() / expected.abs().max())
            wrong = wrong or not off < 0.01
            say(f"check {heads} heads, rows of {length or 'all lengths'}, {name}: off by {off:.1e} of the largest")
        if length:
            parts = qkv[:tokens].view(len(lengths), length, 3, heads, SIZE).permute(2, 0, 3, 1, 4)
            calls["scaled_dot_product_attention"] = partial(F.scaled_dot_product_attention, *parts)
        work = 4.0 * sum(n * n for n in lengths) * heads * SIZE
        for name, (short, warm) in best_of_two(calls, options.seconds).items():
            rates = f"{work / short / 1e6:6.0f} {work / warm / 1e6:6.0f} TFLOP/s"
            say(
                f"{heads} heads, rows of {length or 'all':>3}  {name:30s} {short:8.1f} short {warm:8.1f} hot us  {rates}"
            )
            found.append({"heads": heads, "length": length, "form": name, "short": short, "hot": warm})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    return int(wrong)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
