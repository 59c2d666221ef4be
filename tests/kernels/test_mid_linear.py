"""The linear layers for 3 to 256 rows: where they are used, and on a Hopper GPU the kernel against the references (no
interpreter runs Gluon)."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.hopper import runs_gluon
from headway.kernels.linear_forms.card import H200
from headway.kernels.linear_forms.table import shipped
from headway.kernels.mid_linear import linear_parts, mid_add, mid_gate_up, mid_linear, reference
from headway.kernels.mid_linear.tiles import (
    BUCKETS,
    MAX_ROWS,
    Kind,
    MidTile,
    measured_tiles,
    mid_rows,
    row_bucket,
    tile_for,
)
from headway.kernels.silu_mul import GATES
from headway.kernels.testing import TOLERANCE, assert_close, make_random

SHAPES = [(17, 70, 64), (64, 96, 320), (33, 1024, 1024), (65, 34, 192), (128, 64, 768), (250, 130, 1024)]
"""(T, N, K), N even for gate and up; programs, products and copies that are not full."""
SHIPPED: dict[tuple[Kind, int, int], dict[int, MidTile]] = {
    (kind, outputs, inputs): dict(measured_tiles(kind, outputs, inputs, H200) or {})
    for name, outputs, inputs in shipped()
    for kind in get_args(Kind)
    if kind == name
}
KINDS: tuple[Kind, ...] = ("mid_linear", "mid_gate_up", "mid_add", "linear_parts")
EPS = 1e-5


@pytest.fixture
def hopper() -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


def inputs(shape: tuple[int, int, int], device: str, bias: bool, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """x, weight, bias; products of order one."""
    rows, outputs, size = shape
    return [
        make_random(rows, size, dtype=dtype, device=device),
        make_random(outputs, size, dtype=dtype, device=device, seed=2) * size**-0.5,
        make_random(outputs, dtype=dtype, device=device, seed=3) if bias else None,
    ]


def sums(parts: int, x: torch.Tensor) -> torch.Tensor:
    """Sums of squares of which x's rows are the inputs, so that they have a mean square between 1 / 4 and 4."""
    each = torch.rand(parts, x.shape[0], generator=torch.Generator().manual_seed(4)) * 4 + 0.1
    return each.to(x.device) * (x.shape[1] / parts)


def adding(
    shape: tuple[int, int, int], device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual [T, N] and norm [N]."""
    rows, outputs, _ = shape
    residual = make_random(rows, outputs, dtype=dtype, device=device, seed=6)
    return residual, make_random(outputs, dtype=dtype, device=device, seed=7)


def compare_add(
    op: Any, arguments: list[Any], residual: torch.Tensor, norm: torch.Tensor, tile: MidTile | None = None
) -> None:
    """Against the reference, with a factor beside a bias; ``tile``: the op's, if not the table's."""
    factor = 1.0 if arguments[2] is None else 0.22
    found, expected = residual.clone(), residual.clone()
    y, squares = op(*arguments, found, norm, factor)
    assert squares.shape == mid_add.reference(*arguments, expected, norm, factor)[1].shape
    assert squares.dtype == torch.float32
    assert_added(expected, residual + F.linear(*arguments) * factor, residual)
    assert_added(found, expected, residual)
    follow(found, y, squares, norm, tile or tile_for("mid_add", residual.shape[0], *arguments[1].shape))


def assert_added(found: torch.Tensor, expected: torch.Tensor, residual: torch.Tensor) -> None:
    """Both are ``residual`` and a product. It is rounded before it is added, and by cuBLAS its parts, too: beside the usual
    tolerance two last places of either may be off, which is much of the sum where they cancel."""
    before, after = residual.float(), expected.float()
    absolute, relative = TOLERANCE[residual.dtype]
    places = 2 * torch.finfo(residual.dtype).eps * (before.abs() + (after - before).abs())
    off = (found.float() - after).abs()
    assert bool((off <= absolute + relative * after.abs() + places).all()), f"off by up to {off.max().item()}"


def follow(residual: torch.Tensor, y: torch.Tensor, squares: torch.Tensor, norm: torch.Tensor, tile: MidTile) -> None:
    """y and squares are those of the residual as it is now, which is rounded."""
    assert torch.equal(y, residual * norm)
    sums = torch.stack([columns.float().square().sum(1) for columns in residual.split(tile.wide, dim=1)])
    torch.testing.assert_close(squares, sums, atol=1e-4, rtol=1e-4)


def test_references_follow_the_formula(device: str) -> None:
    x, weight, bias = inputs((5, 6, 1024), "cpu", True, torch.float32)
    y = F.linear(x, weight, bias)
    assert_close(mid_linear.reference(x, weight, bias, None, EPS), y)
    assert_close(mid_gate_up.reference(x, weight, bias, None, EPS), F.silu(y[:, :3]) * y[:, 3:])
    parts = linear_parts.reference(x, weight, bias)
    assert parts.shape == (tile_for("linear_parts", 5, 6, 1024).splits, 5, 6) and parts.shape[0] > 1
    assert_close(parts.sum(0), y)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's code on CPU tensors, see ``gluon_model``."""
    from headway.kernels.mid_linear.hopper import launch
    from tests.kernels.gluon_model import ModelKernel

    for name in ("mid_linear_kernel", "mid_add_kernel"):
        monkeypatch.setattr(launch, name, ModelKernel(name))


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[:2], SHAPES[3], (5, 18, 1024)])
def test_modelled_kernel_equals_reference(shape: tuple[int, int, int], bias: bool) -> None:
    arguments = inputs(shape, "cpu", bias, torch.float16)
    for op in (mid_linear, mid_gate_up):
        for squares in (None, sums(1, arguments[0]), sums(5, arguments[0])):
            more = [*arguments, squares, EPS]
            assert_close(op.implementation("cuda")(*more), op.reference(*more))
    for act in GATES[1:]:
        assert_close(mid_gate_up.implementation("cuda")(*more, act), mid_gate_up.reference(*more, act))
    compare_add(mid_add.implementation("cuda"), arguments, *adding(shape, "cpu", torch.float16))
    parts, expected = linear_parts.implementation("cuda")(*arguments), linear_parts.reference(*arguments)
    torch.testing.assert_close(parts, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 64, 70])
def test_modelled_clusters_share_their_rows(rows: int, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.kernels.mid_linear.hopper import launch

    tile = MidTile(32, 64, 1, 2, 2, 4, cluster=cluster)
    for module in (reference, launch):
        monkeypatch.setattr(module, "tile_for", lambda *_: tile)
    arguments = inputs((rows, 70, 64 * 16), "cpu", True, torch.float16)
    compare_add(launch.mid_add, arguments, *adding((rows, 70, 0), "cpu", torch.float16), tile)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("trailing", [0, 1])
def test_modelled_tiles_of_two_widths(trailing: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.kernels.mid_linear.hopper import launch

    monkeypatch.setattr(launch, "tile_for", lambda *_: MidTile(48, 64, 1, 2, 1, 4, 64, trailing))
    arguments = inputs((rows, 70, 64 * 6), "cpu", True, torch.float16)
    for op in (mid_linear, mid_gate_up):
        for squares in (None, sums(5, arguments[0])):
            more = [*arguments, squares, EPS]
            assert_close(op.implementation("cuda")(*more), op.reference(*more))


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("splits", [1, 2])
def test_copies_and_products_keep_their_order(splits: int) -> None:
    """Every number of chunks in flight: nothing is read before it is there or overwritten before it was read."""
    from headway.kernels.mid_linear.hopper.launch import launch

    x, weight, _ = inputs((3, 20, 64 * 6), "cpu", False, torch.float16)
    expected = F.linear(x.float(), weight.float())
    chunks = 6 // splits
    for w_ahead in range(1, chunks + 1):
        for x_ahead in range(1, w_ahead + 1):
            for trailing in (0, 1):
                out = torch.empty(splits, 3, 20)
                launch(x, weight, None, out, MidTile(16, 64, splits, w_ahead, x_ahead, 4, 64, trailing))
                torch.testing.assert_close(out.sum(0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("modelled")
@pytest.mark.parametrize("trailing", [0, 1])
@pytest.mark.parametrize("chunks", [56, 57, 59])
@pytest.mark.parametrize(("weights", "activations"), [(2, 2), (4, 2), (4, 4), (6, 4), (8, 4)])
def test_long_loops_reuse_their_buffers_in_order(weights: int, activations: int, chunks: int, trailing: int) -> None:
    """Loops whose turns do or do not divide the number of chunks."""
    from headway.kernels.mid_linear.hopper.launch import launch

    x, weight, _ = inputs((3, 20, 64 * chunks), "cpu", False, torch.float16)
    ahead = (weights - 1 - trailing, activations - 1 - trailing)
    if min(ahead) < 1:
        pytest.skip("no copies in flight")
    tile = MidTile(16, 64, 1, *ahead, 4, 64, trailing)
    assert tile.ring(64 * chunks) == math.lcm(weights, activations)
    out = torch.empty(1, 3, 20)
    launch(x, weight, None, out, tile)
    torch.testing.assert_close(out[0], F.linear(x.float(), weight.float()), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, hopper: str) -> None:
    arguments = inputs(shape, hopper, bias, dtype)
    for op in (mid_linear, mid_gate_up):
        for parts in (0, 5, 32):
            more = [*arguments, sums(parts, arguments[0]) if parts else None, EPS]
            found = op.implementation("cuda")(*more)
            assert_close(found, op.reference(*more))
            assert torch.equal(op.implementation("cuda")(*more), found), "a moving result would be a race"
    compare_add(mid_add.implementation("cuda"), arguments, *adding(shape, hopper, dtype))
    parts, expected = linear_parts.implementation("cuda")(*arguments), linear_parts.reference(*arguments)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, expected, atol=1e-4, rtol=1e-4)


EVERY = [(kind, tile) for (kind, _, _), found in SHIPPED.items() for tile in found.values() if not tile.producer]
TILES = sorted({tile for kind, tile in EVERY if kind != "mid_add"}, key=repr)
MEETING = sorted({tile for kind, tile in EVERY if kind == "mid_add"}, key=repr)
ODD_TILES = [
    MidTile(16, 64, 2, 3, 2, 4),
    MidTile(32, 128, 1, 4, 4, 4),
    MidTile(64, 64, 4, 1, 1, 8),
    MidTile(128, 64, 1, 6, 3, 8),
    MidTile(128, 64, 2, 6, 3, 4, 64, 1),
    MidTile(64, 64, 2, 9, 4, 8, 128, 1),
    MidTile(128, 64, 3, 5, 3, 8, 128),
    MidTile(96, 64, 1, 7, 5, 8, 128, 1),
    MidTile(192, 64, 1, 6, 4, 8),
    MidTile(48, 128, 1, 4, 2, 4),
]
LONG = [MidTile(64, 64, 1, 7, 3, 4), MidTile(128, 64, 1, 6, 6, 8, 64, 1), MidTile(64, 128, 1, 3, 3, 8, 128)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*TILES, *ODD_TILES, *LONG], ids=repr)
@pytest.mark.parametrize("rows", [9, 24, 64, 129, 150, 192, 200, 255, 256])
def test_every_tile(tile: MidTile, rows: int, hopper: str) -> None:
    """Rows of x that are strided; bit for bit the same whatever other rows there are; nothing is written beside it."""
    from headway.kernels.mid_linear.hopper.launch import launch

    size = 14336 if tile in LONG else 3072
    if not tile.fits(size):
        size = tile.block_k * tile.splits * tile.w_ahead
    wide, weight, bias = (
        make_random(rows, size + 64, dtype=torch.bfloat16, device=hopper),
        *inputs((1, 70, size), hopper, True)[1:],
    )
    x = wide[:, 32 : 32 + size]
    around = torch.full((64 + tile.splits * rows * 70 + 64,), float("nan"), device=hopper)
    out = around[64:-64].view(tile.splits, rows, 70)
    launch(x, weight, bias, out, tile)
    torch.testing.assert_close(out.sum(0), F.linear(x.float(), weight.float(), bias.float()), atol=1e-3, rtol=1e-3)
    assert bool(around[:64].isnan().all()) and bool(around[-64:].isnan().all())
    fewer = torch.empty(tile.splits, 5, 70, device=hopper)
    for first in (3, rows - 5):
        launch(x[first : first + 5], weight, bias, fewer, tile)
        assert torch.equal(fewer, out[:, first : first + 5])


CLUSTERS = [
    MidTile(16, 64, 1, 3, 2, 4, cluster=2),
    MidTile(32, 128, 1, 2, 1, 4, cluster=4),
    MidTile(64, 64, 1, 4, 4, 4, cluster=8),
    MidTile(128, 64, 1, 5, 3, 8, 64, 1, cluster=2),
    MidTile(64, 64, 1, 3, 2, 8, 128, cluster=4),
    MidTile(32, 64, 1, 8, 4, 4),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*MEETING, *CLUSTERS], ids=repr)
@pytest.mark.parametrize("rows", [1, 3, 9, 64, 129, 150, 192, 200, 255, 256])
def test_every_cluster(tile: MidTile, rows: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cluster(tile, rows, hopper, monkeypatch)


def check_cluster(tile: MidTile, rows: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided rows, the same twice and whatever other rows there are, nothing beside it."""
    from headway.kernels.mid_linear.hopper.launch import launch_add

    monkeypatch.setattr(reference, "tile_for", lambda *_: tile)
    size = next(size for size in (3072, 14336, 4096, *range(1024, 16384, 64)) if tile.fits(size))
    wide, weight, bias = (
        make_random(rows, size + 64, dtype=torch.bfloat16, device=hopper),
        *inputs((1, 70, size), hopper, True)[1:],
    )
    x, norm = wide[:, 32 : 32 + size], adding((1, 70, 0), hopper)[1]

    def run(first: int, last: int) -> list[torch.Tensor]:
        count, programs = last - first, tile.programs(70)
        around = [
            torch.full((64 + count * 70 + 64,), float("nan"), device=hopper, dtype=torch.bfloat16) for _ in range(2)
        ]
        residual, y = (each[64:-64].view(count, 70) for each in around)
        residual.copy_(adding((rows, 70, 0), hopper)[0][first:last])
        squares = torch.full((programs + 2, count), float("nan"), device=hopper)
        launch_add(x[first:last], weight, bias, residual, norm, y, squares[1:-1], tile)
        assert all(bool(each[:64].isnan().all()) and bool(each[-64:].isnan().all()) for each in around)
        assert bool(squares[0].isnan().all()) and bool(squares[-1].isnan().all())
        return [residual.clone(), y.clone(), squares[1:-1].clone()]

    whole = run(0, rows)
    for one, other in zip(whole, run(0, rows), strict=True):
        assert torch.equal(one, other), "a moving result would be a race"
    expected = (residual := adding((rows, 70, 0), hopper)[0]).clone()
    mid_add.reference(x, weight, bias, expected, norm)
    assert_added(whole[0], expected, residual)
    follow(whole[0], whole[1], whole[2], norm, tile)
    if rows >= 9:
        for first in (2, rows - 5):
            for one, other in zip(run(first, first + 5), whole, strict=True):
                assert torch.equal(
                    one, other[..., first : first + 5] if one.shape[-1] == 5 else other[first : first + 5]
                )


@pytest.mark.gpu
def test_layers_without_a_norm_between_them(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decode step has them, in one graph: products that start while those before them still run."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # no fills between them
    x, weight, _ = inputs((40, 1024, 1024), hopper, False)
    up = inputs((40, 2048, 1024), hopper, False)[1]
    start, norm = adding((40, 1024, 1024), hopper)
    residual, expected, y = start.clone(), start.clone(), x
    for _ in range(4):
        z, squares = mid_add.reference(y, weight, None, expected, norm)
        y = mid_gate_up.reference(z, up, None, squares, EPS)

    def step() -> torch.Tensor:
        residual.copy_(start)
        y = x
        for _ in range(4):
            z, squares = mid_add(y, weight, None, residual, norm)
            y = mid_gate_up(z, up, None, squares, EPS)
        return y

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    first = None
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.testing.assert_close(found, y, atol=0.06, rtol=0.06)  # roundings in a row
        torch.testing.assert_close(residual, expected, atol=0.06, rtol=0.06)
        first = found.clone() if first is None else first
        assert torch.equal(found, first)


@pytest.mark.gpu
def test_parts_meet_in_the_norm(hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decode step has it, in one graph: products that start while the norm before them still runs."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # no fills between them
    from headway.kernels.rms_norm import add_parts_rms_norm, add_rms_norm

    x, weight, _ = inputs((40, 1024, 1024), hopper, False)
    norm = make_random(1024, dtype=torch.bfloat16, device=hopper, seed=5)
    residual = make_random(40, 1024, dtype=torch.bfloat16, device=hopper, seed=6)
    expected, y = residual.clone(), x
    start = residual.clone()
    for _ in range(4):
        y = add_rms_norm(linear_parts.reference(y, weight, None).sum(0).bfloat16(), expected, norm, 1e-6)

    def step() -> torch.Tensor:
        residual.copy_(start)
        z = x
        for _ in range(4):
            z = add_parts_rms_norm(linear_parts(z, weight, None), residual, norm, 1e-6)
        return z

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.testing.assert_close(found, y, atol=0.06, rtol=0.06)  # four roundings in a row
        torch.testing.assert_close(residual, expected, atol=0.06, rtol=0.06)


def test_shipped_tiles_fit_and_serve_all_rows_up_to_theirs() -> None:
    assert SHIPPED
    for (kind, outputs, size), found in SHIPPED.items():
        listed = {rows: tile for rows, tile in shipped()[kind, outputs, size].items() if rows}
        assert found.keys() == listed.keys(), "a tile that does not fit is left out"
        used = mid_rows(kind, outputs, size)
        if not found:
            assert not used, "it lost"
            continue
        first = BUCKETS.index(row_bucket(min(found)))
        assert used == range(BUCKETS[first - 1] + 1 if first else 1, max(found) + 1)
        for rows in used:
            assert tile_for(kind, rows, outputs, size) == found[min(most for most in found if rows <= most)]
        for tile in found.values():
            assert tile.fits(size) and (tile.splits == 1 or kind == "linear_parts")
            assert tile.cluster == 1 or kind == "mid_add"
            assert not tile.widths()[1] or kind in ("mid_linear", "mid_gate_up")


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_has_a_tile(kind: Kind) -> None:
    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, MAX_ROWS):
        assert rows <= row_bucket(rows)
        for outputs, size in ((16, 64), (64, 2048), (6144, 1024), (28672, 4096), (4096, 14336), (1024, 3072)):
            tile = tile_for(kind, rows, outputs, size)
            assert tile.fits(size), (rows, outputs, size, tile)
            assert tile.splits == 1 or kind == "linear_parts"
            assert tile.cluster == 1 or kind == "mid_add"


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="K a multiple of 64"):
        tile_for("mid_linear", 20, 64, 1000)
    with pytest.raises(ValueError, match="up to 256 rows"):
        tile_for("mid_linear", 257, 64, 1024)
    assert not mid_rows("mid_linear", 4096, 1000)
    assert not MidTile(32, 64, 3, 4, 4, 4).fits(1024), "K does not divide"
    assert not MidTile(64, 64, 1, 16, 16, 4).fits(1024), "256 KB"
    assert not MidTile(32, 64, 1, 4, 5, 4).fits(1024), "activations of a chunk whose weights are not there"
    assert not MidTile(16, 64, 1, 4, 4, 16).fits(1024), "products are 8 columns wide"
    assert not MidTile(16, 64, 1, 4, 4, 4, cluster=3).fits(1024), "K does not divide"
    assert not MidTile(128, 64, 1, 8, 8, 4, cluster=2).fits(4096), "216 KB, and 34 for a cluster's sums"
    assert not MidTile(112, 64, 1, 4, 4, 4).fits(1024), "not two powers of two"
    assert not MidTile(96, 64, 1, 4, 4, 4, cluster=2).fits(1024), "two widths and a cluster"


def test_meta_gives_shapes() -> None:
    x, weight, bias = inputs((20, 64, 2048), "meta", True)
    assert mid_linear(x, weight, bias, None, 0.0).shape == (20, 64)
    assert mid_gate_up(x, weight, None, None, 0.0).shape == (20, 32)
    y, squares = mid_add(x, weight, None, torch.empty(20, 64, device="meta"), bias)
    assert y.shape == (20, 64) and squares.dtype == torch.float32
    assert squares.shape == (tile_for("mid_add", 20, 64, 2048).programs(64), 20)
    parts = linear_parts(x, weight, None)
    assert parts.shape == (tile_for("linear_parts", 20, 64, 2048).splits, 20, 64) and parts.dtype == torch.float32
