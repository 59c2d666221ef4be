"""Forms of ``dense_attention`` beside each other and torch's: results first, then times.

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

import torch
import torch.nn.functional as F
from timing import time_calls
from wide_gelu import hot, say

from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_attention.hopper.launch import Form, launch_dense

SIZE = 64
FORMS = [
    Form(0, 64, 2, 128), Form(0, 128, 2, 168), Form(1, 64, 3, 80), Form(1, 128, 2, 128), Form(1, 128, 3, 128),
    Form(2, 128, 2, 168),
]  # fmt: skip
CASES = [(12, 510), (12, 256), (12, 128), (12, 0), (16, 384)]
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


def check(form: Form, qkv: torch.Tensor, starts: torch.Tensor, heads: int, longest: int) -> str:
    """Near the op's reference, and of the same bits every time."""
    tokens = int(starts[-1])  # host: a check
    out = torch.full((len(qkv), heads * SIZE), 7.0, dtype=qkv.dtype, device="cuda")
    launch = partial(launch_dense, form, qkv, starts, out, heads, heads, SIZE**-0.5, longest)
    launch()
    wanted = dense_attention.reference(qkv[:tokens], starts, None, heads, heads, SIZE**-0.5, -1, 0.0, longest).float()
    off = float((out[:tokens].float() - wanted).abs().max() / wanted.abs().max())
    first = out.clone()
    for _ in range(20):
        launch()
        if not torch.equal(first, out):
            return "WRONG: bits move from run to run"
    if not bool((out[tokens:] == 7.0).all()):
        return "WRONG: written beyond the end"
    return f"right, off by {off:.1e} of the largest" if off < 0.01 else f"WRONG: off by {off:.1e} of the largest"


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
        longest = max(lengths)
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        qkv = torch.randn(options.tokens, 3 * heads * SIZE, dtype=torch.bfloat16, device="cuda")
        qkv[sum(lengths) :] = torch.nan
        out = torch.empty(options.tokens, heads * SIZE, dtype=qkv.dtype, device="cuda")
        numbers = (heads, heads, SIZE**-0.5)
        calls: dict[str, Callable[[], Any]] = {
            "the op": partial(dense_attention, qkv, starts, None, *numbers, -1, 0.0, longest)
        }
        for form in FORMS:
            try:
                said = check(form, qkv, starts, heads, longest)
            except Exception as error:
                said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            say(f"check {heads} heads, rows of {length or 'all lengths'}, {tuple(form)}: {said}")
            if said.startswith("right"):
                calls[str(tuple(form))] = partial(launch_dense, form, qkv, starts, out, *numbers, longest)
            wrong = wrong or not said.startswith("right")
        if length:
            parts = qkv[: sum(lengths)].view(len(lengths), length, 3, heads, SIZE).permute(2, 0, 3, 1, 4)
            calls["scaled_dot_product_attention"] = partial(F.scaled_dot_product_attention, *parts)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(2):
            for name, call in calls.items():
                times[name].append((time_calls([call]), hot(call, options.seconds)))
        work = 4.0 * sum(n * n for n in lengths) * heads * SIZE
        for name, each in times.items():
            short, warm = (min(pair) for pair in zip(*each, strict=True))
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
