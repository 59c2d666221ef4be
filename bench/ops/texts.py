"""The parts of a layer of BERT-base in a full step, and candidates for them: GELU's places, and tiles of attention.

    PYTHONPATH=. python bench/ops/texts.py [--tokens 8192]

``short`` is the best of several graphs, ``hot`` the mean over a longer time, with the card's clock where its power holds it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.add_layer_norm import add_layer_norm
from headway.kernels.dense_attention import reference
from headway.kernels.dense_attention.triton import dense_kernel
from headway.kernels.silu_mul import gelu
from headway.kernels.wide_linear import wide_gelu
from headway.kernels.wide_linear.hopper.launch import launch_gelu
from headway.kernels.wide_linear.tiles import wide_tokens

HIDDEN, INNER, HEADS, SIZE = 768, 3072, 12, 64
TILES = [
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 4), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2),
    (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 3),
]  # fmt: skip
"""(queries, keys, warps, stages)."""


def say(name: str, call: Callable[[], Any], flops: float = 0.0) -> None:
    """Print a line, or why there is none."""
    try:
        short = time_calls([call])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        graph.replay()
        torch.cuda.synchronize()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 0.4:
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            count += 200
        hot = (time.perf_counter() - begin) / count * 1e6
    except Exception as error:
        print(f"{name:<44} {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
        return
    rate = f"{flops / short / 1e6:8.0f} {flops / hot / 1e6:5.0f} TFLOP/s" if flops else ""
    print(f"{name:<44} {short:8.1f} short {hot:8.1f} hot us {rate}", flush=True)


def near(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Print how far a candidate is off."""
    off = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    print(f"{name:<44} {'equal' if off < 0.01 else 'WRONG'}, off by {off:.2e} of the largest", flush=True)


def products(tokens: int) -> None:
    """The first product of the feed-forward block with GELU, and the other three."""
    made = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    x, up, bias = made(tokens, HIDDEN), made(INNER, HIDDEN) * HIDDEN**-0.5, made(INNER)
    inner, down = made(tokens, INNER), made(HIDDEN, INNER) * INNER**-0.5
    qkv, short = made(3 * HIDDEN, HIDDEN) * HIDDEN**-0.5, made(HIDDEN)
    flops = 2.0 * tokens * HIDDEN * INNER
    before = F.linear(x, up, bias)
    near("gelu", gelu(inner), F.gelu(inner))
    say("gelu of torch", lambda: F.gelu(inner))
    say("gelu", lambda: gelu(inner))
    say("up", lambda: F.linear(x, up, bias), flops)
    say("up, gelu of torch", lambda: F.gelu(F.linear(x, up, bias)), flops)
    say("up, gelu", lambda: gelu(F.linear(x, up, bias)), flops)
    for parts in (2, 4):
        cut = x.chunk(parts)

        def in_parts(cut: Any = cut) -> list[torch.Tensor]:
            return [gelu(F.linear(each, up, bias)) for each in cut]

        say(f"up, gelu in {parts} parts", in_parts, flops)
    say("up, gelu by tanh in cuBLASLt", lambda: torch._addmm_activation(bias, x, up.t(), use_gelu=True), flops)  # noqa: SLF001
    for tanh in (True, False):
        near(f"wide_gelu tanh={tanh}", wide_gelu(x, up, bias, tanh), F.gelu(before, approximate=("none", "tanh")[tanh]))
        for warps in (0, 2, 4):
            say(f"wide_gelu {warps} tanh={tanh}", partial(launch_gelu, x, up, bias, inner, tanh, warps), flops)
    for fewer in (2048, 4096, 6144, 16384):
        x = made(fewer, HIDDEN)
        used = any(fewer in each for each in wide_tokens("wide_gelu", INNER, HIDDEN))
        say(f"{fewer}: wide_gelu, {'used' if used else 'not used'}", partial(wide_gelu, x, up, bias, False))
        say(f"{fewer}: up, gelu", partial(lambda x: gelu(F.linear(x, up, bias)), x))
    x = made(tokens, HIDDEN)
    say("down", lambda: F.linear(inner, down, short), flops)
    wide_bias = made(3 * HIDDEN)
    say("qkv", lambda: F.linear(x, qkv, wide_bias), flops * 0.75)
    say("out", lambda: F.linear(x, qkv[:HIDDEN], short), flops * 0.25)
    residual, weight = made(tokens, HIDDEN), made(HIDDEN)
    say("add_layer_norm", lambda: add_layer_norm(x, residual, weight, short, 1e-12))


def attention(tokens: int, length: int) -> None:
    """Texts of one length, in grids for 256, 32 and just as many rows; then in other tiles."""
    rows = tokens // length
    qkv = torch.randn(tokens, 3 * HIDDEN, dtype=torch.bfloat16, device="cuda")
    longest = 512 if length > 128 else 128
    flops = 4.0 * rows * length * length * HIDDEN
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def launch(starts: torch.Tensor, tile: tuple[int, int, int, int]) -> None:
        block_q, block_k, warps, stages = tile
        dense_kernel[(cdiv(longest, block_q), HEADS, len(starts) - 1)](
            qkv, starts, qkv, out, tokens, qkv.stride(0), SIZE**-0.5, -1, 0.0, 0, H=HEADS, KH=HEADS, D=SIZE, BLOCK_D=SIZE,
            BLOCK_Q=block_q, BLOCK_K=block_k, BIAS=False, NEAR=False, CAPPED=False, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def starts_of(count: int) -> torch.Tensor:
        return (torch.arange(count + 1, device="cuda") * length).clamp(max=rows * length).int()

    for count in sorted({256, 2 * tokens // longest, rows}, reverse=True):
        say(
            f"attention {rows} x {length} in a grid of {count} rows", partial(launch, starts_of(count), TILES[0]), flops
        )
    expected = reference.dense_attention(
        qkv[: 2 * length], starts_of(2), None, HEADS, HEADS, SIZE**-0.5, -1, 0.0, length
    )
    for tile in TILES:
        if max(tile[:2]) > longest:
            continue
        try:
            launch(starts_of(rows), tile)
        except Exception as error:
            print(tile, type(error).__name__, str(error)[:100])
            continue
        near(str(tile), out[: 2 * length], expected)
        say(f"attention {rows} x {length} {tile}", partial(launch, starts_of(rows), tile), flops)
    parts = qkv[: rows * length].view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    say("scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(*parts), flops)


def main() -> int:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        products(options.tokens)
        for length in (510, 128):
            attention(options.tokens, length)
    return 0


if __name__ == "__main__":
    sys.exit(main())
