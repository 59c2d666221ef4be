"""How fast decode steps stream the states of the gated delta net and of Mamba-2, by blocks and warps of their kernels.

    python bench/ops/delta_states.py [--rows 1 8 64 256] [--only token walk three ssd]

Shapes are those of the anchors gdn_08b (16 key heads, 32 value heads of 128 x 128) and mamba2_780m (48 heads of 64 x 128);
states are float32, the rest bfloat16. Calls go over states of several layers, together larger than the L2 cache, in one CUDA
graph, timed by events. A state counts twice, read and written; what torch reaches when it scales the same states in place
stands beside that. Every variant's outputs are first compared with those of the kernels as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.causal_conv import causal_conv
from headway.kernels.delta_decode import triton as token_module
from headway.kernels.gated_delta import gated_delta
from headway.kernels.gated_delta import triton as delta_module
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.kernels.ssd_scan import ssd_scan
from headway.kernels.ssd_scan import triton as ssd_module

KEY_HEADS, HEADS, SIZE, TAPS = 16, 32, 128, 4
SSD_HEADS, SSD_WIDTH, SSD_SIZE = 48, 64, 128
CACHE_BYTES = 200 << 20
"""Several times an L2 cache."""


@dataclass(frozen=True)
class Swept:
    """A kernel that is launched with other constants, and the grid that belongs to them."""

    kernel: Any
    constants: dict[str, Any]
    grid: tuple[int, ...] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            return self.kernel[self.grid or grid](*args, **constants | self.constants)

        return launch


Change = tuple[Any, str, Any]
"""What is patched for a variant: an object, an attribute, its value."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def step_of(rows: int) -> tuple[Any, ...]:
    """Decode rows in the middle of their texts, in slots of any order."""
    start = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    slots = torch.randperm(rows, device="cuda").int()
    lens, packed = torch.full((rows,), 1000, dtype=torch.int32, device="cuda"), torch.zeros(64).int().cuda()
    return start, slots, lens, packed, 0, 1, 1


def state_layers(rows: int, *shape: int) -> torch.Tensor:
    """[layers, rows, *shape]"""
    own = rows * torch.Size(shape).numel() * 4
    return random(max(3, cdiv(CACHE_BYTES, own)), rows, *shape, dtype=torch.float32) * 0.1


def delta_calls(rows: int) -> tuple[torch.Tensor, dict[str, Callable[[int], torch.Tensor]]]:
    """(states, of each op what it does to a layer)."""
    states, step = state_layers(rows, HEADS, SIZE, SIZE), step_of(rows)
    keys, values = KEY_HEADS * SIZE, HEADS * SIZE
    x, gate, decay, beta = (
        random(rows, 2 * keys + values),
        random(rows, values),
        random(rows, HEADS),
        random(rows, HEADS),
    )
    weight, ring = random(x.shape[1], TAPS), random(len(states), rows, TAPS, x.shape[1])
    a_log, bias, norm = random(HEADS).float(), random(HEADS).float(), random(SIZE)
    rule = decay, a_log, bias, beta, 1.0, SIZE**-0.5

    def walk(layer: int, convolved: torch.Tensor = x) -> torch.Tensor:
        q, k, v = (each.unflatten(1, (-1, SIZE)) for each in convolved.split((keys, keys, values), 1))
        found: torch.Tensor = gated_delta(q, k, v, *rule, states[layer], *step)
        return found

    def three(layer: int) -> torch.Tensor:
        o = walk(layer, causal_conv(x, weight, None, ring[layer], *step, True))
        found: torch.Tensor = gated_rms_norm(o.flatten(1), gate, norm, 1e-6, SIZE, False, False)
        return found

    def token(layer: int) -> torch.Tensor:
        return token_module.delta_decode(x, weight, ring[layer], *rule, states[layer], gate, norm, 1e-6, False, *step)

    return states, {"token": token, "three": three, "walk": walk}


def ssd_call(rows: int) -> tuple[torch.Tensor, dict[str, Callable[[int], torch.Tensor]]]:
    """The same of Mamba-2."""
    states, step = state_layers(rows, SSD_HEADS, SSD_WIDTH, SSD_SIZE), step_of(rows)
    x, dt = random(rows, SSD_HEADS, SSD_WIDTH), random(rows, SSD_HEADS)
    b, c = random(rows, 1, SSD_SIZE), random(rows, 1, SSD_SIZE)
    bias, a, d = random(SSD_HEADS), -random(SSD_HEADS).float().abs(), random(SSD_HEADS)

    def ssd(layer: int) -> torch.Tensor:
        found: torch.Tensor = ssd_scan(x, dt, bias, a, b, c, d, 0.0, float("inf"), states[layer], *step)
        return found

    return states, {"ssd": ssd}


def variants(op: str, rows: int) -> Iterator[tuple[str, list[Change]]]:
    """Names and patches; the first is the kernel as it is."""
    yield "as it is", []
    if op == "token":
        for ahead in (False, True):
            for warps in (4, 8):
                changes: list[Change] = [
                    (token_module, "A_WARPS", SIZE * SIZE // warps),
                    (token_module, "AHEAD", ahead),
                ]
                yield f"{warps} warps{', states before the wait' if ahead else ''}", changes
    if op == "walk":
        for block, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8)):
            yield f"{block} values, {warps} warps", [
                (delta_module, "WALKED", block * SIZE), (delta_module, "WALK_WARPS", warps)
            ]  # fmt: skip
    if op == "ssd":
        kernel = ssd_module.ssd_update_kernel
        for block, warps in ((8, 1), (8, 2), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8)):
            grid = rows, SSD_HEADS, cdiv(SSD_WIDTH, block)
            swept = Swept(kernel, {"BLOCK_P": block, "num_warps": warps}, grid)
            yield f"{block} channels, {warps} warps", [(ssd_module, "ssd_update_kernel", swept)]


def measure(op: str, rows: int, states: torch.Tensor, call: Callable[[int], torch.Tensor]) -> None:
    """A line for each variant."""
    moved, kept, wanted = 2 * states[0].numel() * 4, states[0].clone(), None
    for name, changes in variants(op, rows):
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(patch.object(*change))
            states[0].copy_(kept)
            found = call(0).float()
            wanted = found if wanted is None else wanted
            error = float((found - wanted).abs().max() / wanted.abs().max())
            us = time_calls([partial(call, layer) for layer in range(len(states))])
        told = "" if error <= 0.02 else f"  DIFFERS by {error:.3g}"
        sys.stdout.write(f"{op:6s} {rows:4d} rows  {name:36s} {us:8.2f} us {moved / us / 1e6:6.2f} TB/s{told}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--only", nargs="+", default=["token", "three", "walk", "ssd"])
    chosen = parser.parse_args()
    for rows in chosen.rows:
        for make in (delta_calls, ssd_call):
            torch.manual_seed(0)
            states, calls = make(rows)
            us = time_calls([partial(layer.mul_, 0.999) for layer in states])
            moved = 2 * states[0].numel() * 4
            sys.stdout.write(f"torch  {rows:4d} rows  {'in place':36s} {us:8.2f} us {moved / us / 1e6:6.2f} TB/s\n")
            for op in [each for each in calls if each in chosen.only]:
                measure(op, rows, states, calls[op])
            del states, calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
