"""The decode attention kernel for Hopper, run on the CPU by a model of its language."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.paged_attention import launch, paged_attention
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import EarlyTile
from headway.kernels.testing import assert_close, interpreter_loops, make_paged_inputs
from tests.kernels.gluon_decode import modelled
from tests.kernels.pairs import pairs
from tests.kernels.test_decode_attention import ROWS, check, check_saturation, make

TILES = [EarlyTile(4, 1), EarlyTile(2, 3), EarlyTile(4, 2, 1.5), EarlyTile(8, 1, 0.2), EarlyTile(2, 2, 0.1),
         EarlyTile(4, 1, 3.0, 8), EarlyTile(2, 1, 3.0, 4), EarlyTile(4, 1, 0.1, 2)]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {"heads": (6, 2), "size": 128, "dtype": torch.float16},
    {"heads": (6, 2), "size": 64, "dtype": torch.bfloat16},
    {"heads": (8, 1), "size": 128, "dtype": torch.float16, "norms": False},
    {"heads": (2, 2), "size": 64, "dtype": torch.float16, "window": 30},
    {"heads": (4, 2), "size": 128, "dtype": torch.float16, "soft_cap": 0.7, "window": 7, "block_size": 16},
    {"heads": (6, 2), "size": 128, "dtype": torch.bfloat16, "cached": torch.float8_e4m3fn},
    {"heads": (8, 1), "size": 64, "dtype": torch.float16, "sinks": True, "window": 40},
    {"heads": (6, 2), "size": 128, "dtype": torch.float16, "chunk": 48, "sinks": True},
    {"heads": (4, 1), "size": 256, "dtype": torch.bfloat16, "window": 50},
    {
        "heads": (4, 1),
        "size": 64,
        "dtype": torch.float16,
        "cached": torch.float8_e4m3fn,
        "window": 30,
        "block_size": 16,
    },
]


@pytest.mark.parametrize(("shape", "tile"), pairs(SHAPES, TILES, 3))
def test_kernel_equals_reference(shape: dict[str, Any], tile: EarlyTile) -> None:
    with modelled(), patch.object(early_decode, "early_tile", lambda *_: tile):
        check(make(ROWS, "cpu", pad_rows=1, **shape))


def test_the_order_of_programs_does_not_matter() -> None:
    found = []
    for seed in range(3):
        with modelled(seed):
            found.append(check(make([200, 33], "cpu", **SHAPES[0])))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float16), (30, torch.bfloat16)])
def test_decode_rows_beside_prompts(window: int, dtype: torch.dtype, tile: EarlyTile) -> None:
    """Their queries are turned and their newest keys cached; with a cache of 8 bits the kernel serves them too."""
    rows = [(1, 70), (1, 0), (1, 9), (1, 200), (1, 1), (5, 5), (21, 71)]
    inputs = make_paged_inputs(
        rows, num_decode_rows=5, heads=(6, 2), size=128, block_size=8, dtype=dtype, device="cpu", heads_first=True,
        pad_rows=1, pad_tokens=2, cached=torch.float8_e4m3fn, bound=300,
    )  # fmt: skip
    tiles = patch.object(early_decode, "TURNED_TILE", tile)
    triton = patch.object(launch, "launch_decode", None)
    with modelled(), interpreter_loops(), tiles, triton, patch.object(launch, "launch_prefill", lambda *_: None):
        found = paged_attention.implementation("cuda")(*inputs.arguments(0.1, window))
    expected = paged_attention.reference(*inputs.arguments(0.1, window))
    assert_close(found[:5], expected[:5])


@pytest.mark.skipif(torch.cuda.is_available(), reason="its prompts' kernel runs in Triton's interpreter")
@pytest.mark.parametrize("tile", [EarlyTile(4, 1), EarlyTile(2, 3), EarlyTile(4, 1, 3.0, 8)], ids=str)
@pytest.mark.parametrize("window", [0, 30])
def test_fewer_rows_of_8_bits_decode_than_their_bound(window: int, tile: EarlyTile) -> None:
    """What the kernel writes for the rows behind them, which are prompts, the prompts' kernel writes again."""
    rows = [(1, 70), (1, 0), (1, 9), (5, 150), (21, 91)]
    inputs = make_paged_inputs(
        rows, num_decode_rows=5, heads=(6, 2), size=128, block_size=8, dtype=torch.bfloat16, device="cpu",
        heads_first=True, pad_rows=2, pad_tokens=2, cached=torch.float8_e4m3fn, bound=300,
    )  # fmt: skip
    inputs = replace(inputs, decode_rows=torch.tensor([3], dtype=torch.int32))
    tiles, triton = patch.object(early_decode, "TURNED_TILE", tile), patch.object(launch, "launch_decode", None)
    poison = patch.object(torch, "empty", lambda size, **kind: torch.full(size, float("nan"), **kind))
    with modelled(), interpreter_loops(), tiles, triton, poison:
        found = paged_attention.implementation("cuda")(*inputs.arguments(0.1, window))
    assert_close(found, paged_attention.reference(*inputs.arguments(0.1, window)))
    assert not inputs.arrivals.any()


def test_8_bit_floats_end_at_their_largest() -> None:
    with modelled():
        check_saturation(SHAPES[0], "cpu")
