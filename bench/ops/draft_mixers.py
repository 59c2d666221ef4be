"""Times what stands between the products of mixers with states in steps of drafts: in one launch, and in its parts.

    python bench/ops/draft_mixers.py [--shape gdn kda mamba2-780m] [--rows 1 8 64 256] [--drafts 3] [--again 4]

us a layer, of layers with states of their own in one CUDA graph, together larger than the L2 cache: ``plain`` is a row of one
token without a ring, ``parts`` and ``one`` a row with drafts. All rows run ``again`` tokens again, and of seven rows two store
their states, as with an acceptance length of 2.5. ``bytes`` is the time that a row's states, ring and tokens take at the card's
bandwidth. Outputs are compared first, and so are those of rows of one token that follow one another: bits that drafts change
are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from limits import BYTES_PER_US
from timing import time_calls

from headway.core.chunks import ring_places
from headway.core.ints import cdiv
from headway.kernels.causal_conv.triton import causal_conv
from headway.kernels.delta_decode import delta_decode
from headway.kernels.delta_decode.triton import delta_decode as one_delta
from headway.kernels.ssd_decode.reference import composed
from headway.kernels.ssd_decode.triton import ssd_decode as one_ssd
from headway.kernels.ssd_scan.triton import ssd_scan

DELTAS = {"gdn": (16, 32, 128, 128, False), "kda": (32, 32, 128, 128, True)}
"""Heads of keys and of values, their sizes, and whether channels decay by themselves."""
MAMBAS = {"mamba2-780m": (48, 64, 1, 128), "nemotron-h-8b": (128, 64, 8, 128)}
"""Heads, P, groups, N."""
TAPS, START, CACHE_BYTES = 4, 500, 200 << 20
Form = Callable[..., torch.Tensor]
half = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
wide = partial(torch.rand, dtype=torch.float32, device="cuda")


def step_of(rows: int, width: int, start: int = START) -> tuple[Any, ...]:
    ints = partial(torch.full, (rows,), dtype=torch.int32, device="cuda")
    begins = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * width
    slots = torch.randperm(rows, device="cuda").int()
    return begins, slots, ints(fill_value=start + width), torch.zeros(64).int().cuda(), 0, width, width


def ring_of(rows: int, width: int, again: int, per_token: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    inputs = -wide(rows, ring_places(8, width), per_token).to(dtype) * 0.1
    stored = torch.full((rows,), START - again, dtype=torch.int32, device="cuda")
    stores = torch.arange(rows, device="cuda") % 7 < 2
    return inputs, stored, torch.where(stores, START + 1, -1).int()


def delta_layer(shape: str, rows: int, width: int, again: int) -> list[Any]:
    """Arguments of ``delta_decode``; ``again`` < 0: without a ring."""
    keys, heads, size, values, by_channel = DELTAS[shape]
    tokens, channels = rows * width, 2 * keys * size + heads * values
    decay, bias = (half(tokens, heads, size), wide(heads, size)) if by_channel else (half(tokens, heads), wide(heads))
    per_token = keys * size + heads * values + bias.numel()
    return [
        half(tokens, channels), half(channels, TAPS), half(rows, TAPS + width - 1, channels), decay, wide(heads), bias,
        half(tokens, heads), 1.0, size**-0.5, wide(rows, heads, size, values) * 0.1, half(tokens, heads * values),
        half(values), 1e-6, by_channel, *step_of(rows, width),
        *(ring_of(rows, width, again, per_token, torch.float32) if again >= 0 else ()),
    ]  # fmt: skip


def mamba_layer(shape: str, rows: int, width: int, again: int) -> list[Any]:
    """Likewise of ``ssd_decode``."""
    heads, p, groups, n = MAMBAS[shape]
    tokens, channels = rows * width, heads * p + 2 * groups * n
    return [
        half(tokens, channels), half(channels, TAPS), half(channels), half(rows, TAPS + width - 1, channels),
        half(tokens, heads), wide(heads), -wide(heads), wide(heads), 0.0, float("inf"), wide(rows, heads, p, n) * 0.1,
        *step_of(rows, width),
        *(ring_of(rows, width, again, heads * p + groups * n + heads, torch.bfloat16) if again >= 0 else ()),
    ]  # fmt: skip


def separate_ssd(*args: Any) -> torch.Tensor:
    return composed(causal_conv, ssd_scan, args[0], args[1:4], args[4:11], args[11:18], args[18:])


def forms(shape: str) -> tuple[Callable[..., list[Any]], int, Form, Form]:
    """(a layer's arguments, where its states stand among them, one launch, several)."""
    if shape in DELTAS:
        return delta_layer, 9, one_delta, delta_decode.reference
    return mamba_layer, 10, one_ssd, separate_ssd


def bits(make: Callable[..., list[Any]], shape: str, state: int, one: Form, width: int) -> str:
    """How many outputs of a row of drafts differ from those of rows of one token."""
    args = make(shape, 1, width, 0)
    step, window = (14, 2) if shape in DELTAS else (11, 3)
    kept = [each.clone() if isinstance(each, torch.Tensor) else each for each in args[:-3]]
    together, found = one(*args), []
    for t in range(width):
        mine = [
            each[t : t + 1] if isinstance(each, torch.Tensor) and i < step and len(each) == width else each
            for i, each in enumerate(kept)
        ]
        mine[window], mine[state] = kept[window], kept[state]
        mine[step : step + 7] = step_of(1, 1, START + t)
        found.append(one(*mine))
    differing = int((together != torch.cat(found)).sum())
    return f"{differing} of {together.numel()} outputs differ from rows of one token"


def moved(args: list[Any], state: int, again: int) -> float:
    """Bytes of a layer: tokens and states in and out, and the ring."""
    tokens, states = args[0].nbytes * 3, args[state].nbytes
    if again < 0:
        return tokens + 2 * states
    inputs = args[-3]
    one_place = inputs.nbytes / inputs.shape[1]
    return tokens + states * (1 + 2 / 7) + one_place * (again + 3.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["gdn", "kda", "mamba2-780m"], choices=[*DELTAS, *MAMBAS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--again", type=int, default=4)
    chosen = parser.parse_args()
    width = chosen.drafts + 1
    for shape in chosen.shape:
        make, state, one, parts = forms(shape)
        sys.stdout.write(f"{shape}: {bits(make, shape, state, one, width)}\n")
        for rows in chosen.rows:
            torch.manual_seed(rows)
            args = make(shape, rows, width, chosen.again)
            clones = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
            wanted, found = parts(*clones).flatten(1).float(), one(*args).flatten(1).float()
            error = float((wanted - found).abs().max() / wanted.abs().max())
            count = max(3, cdiv(CACHE_BYTES, args[state].nbytes))
            line = f"{shape:14s} {rows:4d} rows: bytes {moved(args, state, chosen.again) / BYTES_PER_US:7.1f}"
            for name, form, tokens, again in (
                ("plain", one, 1, -1), ("parts", parts, width, chosen.again), ("one", one, width, chosen.again),
            ):  # fmt: skip
                layers = [make(shape, rows, tokens, again) for _ in range(count)]
                line += f"  {name} {time_calls([partial(form, *layer) for layer in layers]):7.1f}"
                del layers
                torch.cuda.empty_cache()
            sys.stdout.write(f"{line}{'' if error < 0.02 else f'  DIFFERS by {error:.3g}'}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
