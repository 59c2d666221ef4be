"""The fused linear layers against their references, and where the table says to use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.kernels.linear_forms.table import shipped
from headway.kernels.skinny_linear import linear_add, norm_gate_up, norm_linear, skinny_linear
from headway.kernels.skinny_linear.tiles import Kind, Tile, fused_rows, row_bucket, tile_for
from headway.kernels.testing import assert_close, kernel_dtypes, make_random

SHAPES = [(1, 2, 8), (1, 66, 1030), (2, 30, 63), (3, 34, 40), (5, 2, 513), (16, 38, 257), (17, 10, 24), (0, 4, 8)]
"""(T, N, K), N even for gate and up; half of it odd in some."""

dtypes = pytest.mark.parametrize("dtype", kernel_dtypes())
shapes = pytest.mark.parametrize("shape", SHAPES)
biased = pytest.mark.parametrize("bias", [False, True])


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str, bias: bool) -> dict[str, Any]:
    """Products of order one."""
    rows, outputs, size = shape
    return {
        "x": make_random(rows, size, dtype=dtype, device=device),
        "norm": make_random(size, dtype=dtype, device=device, seed=1),
        "weight": make_random(outputs, size, dtype=dtype, device=device, seed=2) * size**-0.5,
        "bias": make_random(outputs, dtype=dtype, device=device, seed=3) if bias else None,
    }


@dtypes
@shapes
@biased
def test_skinny_linear(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    i = inputs(shape, dtype, device, bias)
    args = (i["x"], i["weight"], i["bias"])
    assert_close(skinny_linear.implementation("cuda")(*args), skinny_linear.reference(*args))


@dtypes
@shapes
@biased
def test_norm_linear_and_gate_up(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    i = inputs(shape, dtype, device, bias)
    args = (i["x"] * 3, i["norm"], 1e-5, i["weight"], i["bias"])
    for op in (norm_linear, norm_gate_up):
        assert_close(op.implementation("cuda")(*args), op.reference(*args))
    for norm, act in ((i["norm"].float(), "gelu_tanh"), (None, "gelu"), (None, "silu")):  # norms' weights may be f32
        gated = (i["x"] * 3, norm, 1e-5, i["weight"], i["bias"], act)
        assert_close(norm_gate_up.implementation("cuda")(*gated), norm_gate_up.reference(*gated))


@dtypes
@shapes
@biased
def test_linear_add_is_in_place(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    """Rows of x and of the residual may be strided; what lies beside them stays. A factor is of the product and its bias."""
    factor = 0.22 if bias else 1.0
    i = inputs(shape, dtype, device, bias)
    rows, outputs, size = shape
    x = make_random(rows, size + 5, dtype=dtype, device=device)[:, 3 : 3 + size]
    wide = make_random(rows, outputs + 9, dtype=dtype, device=device, seed=4)
    expected = wide.clone()
    expected[:, 4 : 4 + outputs] += skinny_linear.reference(x, i["weight"], i["bias"]) * factor
    assert linear_add.implementation("cuda")(x, i["weight"], i["bias"], wide[:, 4 : 4 + outputs], factor) is None
    assert_close(wide, expected)
    assert torch.equal(wide[:, :4], expected[:, :4]) and torch.equal(wide[:, 4 + outputs :], expected[:, 4 + outputs :])


SHIPPED = {
    key: found
    for key, found in shipped().items()
    if key[0] not in ("mid_linear", "mid_gate_up", "mid_add", "linear_parts")
}
TILES = sorted({Tile(*numbers) for found in SHIPPED.values() for numbers in found.values()}, key=repr)


@pytest.mark.parametrize("tile", TILES if torch.cuda.is_available() else TILES[::3], ids=repr)
def test_every_tile_of_the_table(tile: Tile, device: str) -> None:
    check_tile(tile, 2 if tile.splits == 0 else 7, device)


def test_one_row_takes_a_tile_of_tensor_cores(device: str) -> None:
    check_tile(Tile(16, 128, 4, 4, 3, 1), 1, device)


def check_tile(tile: Tile, rows: int, device: str) -> None:
    """On a small odd shape: what a tile reaches beyond the matrix counts for nothing."""
    from headway.kernels.skinny_linear.triton import ADD, SILU, STORE, launch

    i = inputs((rows, 70, 2072), torch.float16, device, True)
    for mode, outputs, op in ((STORE, 70, norm_linear), (SILU, 35, norm_gate_up)):
        out = torch.empty(rows, outputs, dtype=torch.float16, device=device)
        launch(i["x"], i["norm"], 1e-6, i["weight"], i["bias"], out, mode, tile)
        assert_close(out, op.reference(i["x"], i["norm"], 1e-6, i["weight"], i["bias"]))
    out = make_random(rows, 70, dtype=torch.float16, device=device, seed=6)
    expected = out.clone()
    linear_add.reference(i["x"], i["weight"], None, expected)
    launch(i["x"], None, 0.0, i["weight"], None, out, ADD, tile)
    assert_close(out, expected)


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    """Bit for bit, within a bucket of row counts."""
    i = inputs((7, 40, 96), torch.float16, device, False)
    run = norm_linear.implementation("cuda")
    rest = (i["norm"], 1e-6, i["weight"], None)
    together = run(i["x"], *rest)
    assert torch.equal(run(i["x"][:5].flip(0).contiguous(), *rest).flip(0), together[:5])


def test_what_was_measured_decides() -> None:
    wanted: dict[tuple[Kind, int, int], int] = {
        ("norm_gate_up", 6144, 1024): 16,
        ("norm_linear", 6144, 4096): 8,
        ("linear_add", 4096, 14336): 8,
        ("skinny_linear", 151936, 1024): 16,
    }
    assert {key: fused_rows(*key) for key in wanted} == wanted


def test_the_rule_for_other_shapes() -> None:
    assert fused_rows("linear_add", 1000, 2000) == 16
    assert fused_rows("linear_add", 1000, 2001) == 0, "rows that begin anywhere load slowly"
    # 4096 x 2048 (q, k and v of Qwen3-1.7B) is measured: the shipped table says 4 there, so the rule is asked beside it.
    assert [fused_rows("norm_linear", n, 2048) for n in (4095, 4097)] == [16, 8], "programs norm all rows anew"


@pytest.mark.parametrize("kind", ["skinny_linear", "norm_linear", "norm_gate_up", "linear_add"])
def test_every_tile_can_be_launched(kind: Kind) -> None:
    for rows in (1, 2, 3, 16, 64):
        for outputs, size in ((2, 8), (6144, 1024), (28672, 4096), (151936, 1024)):
            tile = tile_for(kind, rows, outputs, size)
            assert tile.block_n >= 1 and tile.num_warps % max(tile.splits, 1) == 0
            assert tile.splits or row_bucket(rows) == 1, "more rows want tensor cores"


def test_meta_gives_shapes() -> None:
    i = inputs((3, 8, 16), torch.float16, "meta", True)
    assert skinny_linear(i["x"], i["weight"], None).shape == (3, 8)
    assert norm_linear(i["x"], i["norm"], 1e-6, i["weight"], i["bias"]).shape == (3, 8)
    assert norm_gate_up(i["x"], i["norm"], 1e-6, i["weight"], i["bias"]).shape == (3, 4)
    assert linear_add(i["x"], i["weight"], None, torch.empty(3, 8, device="meta", dtype=torch.float16)) is None
