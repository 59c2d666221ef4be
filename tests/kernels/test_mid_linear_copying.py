"""Linear layers for decode rows whose copies are the work of a warp: on a model of the language, and on Hopper."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.mid_linear import mid_add, mid_gate_up, mid_linear, reference
from headway.kernels.mid_linear.tiles import MidTile
from headway.kernels.testing import assert_close, make_random
from tests.kernels import test_mid_linear as others
from tests.kernels.test_mid_linear import EPS, SHIPPED, adding, check_cluster, compare_add, inputs, sums

hopper = others.hopper


def copying(wide: int, stages: int, cluster: int = 1) -> MidTile:
    return MidTile(wide, 64, 1, stages, stages, 4, cluster=cluster, producer=True)


COPYING = [copying(32, 12), copying(64, 3), copying(128, 4), copying(256, 2)]
COPYING_CLUSTERS = [copying(32, 16), copying(64, 5, 2), copying(32, 3, 4)]


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: MidTile) -> None:
    from headway.kernels.mid_linear.hopper import launch

    for module in (reference, launch):
        monkeypatch.setattr(module, "tile_for", lambda *_: tile)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a copying warp on CPU tensors, see ``wide_model``; three programs share the tiles of one."""
    from headway.kernels.mid_linear.hopper import launch
    from tests.kernels.wide_model import ModelKernel

    for name, programs in (("thin_linear_kernel", 3), ("thin_add_kernel", 10_000)):
        monkeypatch.setattr(launch, name, ModelKernel(getattr(launch, name), programs))


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", COPYING, ids=repr)
@pytest.mark.parametrize("shape", [(1, 16, 64), (17, 144, 320), (64, 1040, 512)])
def test_modelled_copying_warp_equals_reference(
    shape: tuple[int, int, int], tile: MidTile, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    arguments = inputs(shape, "cpu", bias, torch.float16)
    for op in (mid_linear, mid_gate_up):
        for parts in (0, 1, 5):
            more = [*arguments, sums(parts, arguments[0]) if parts else None, EPS]
            assert_close(op.implementation("cuda")(*more), op.reference(*more))


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", COPYING_CLUSTERS, ids=repr)
@pytest.mark.parametrize("rows", [1, 3, 33, 64])
def test_modelled_copying_warps_sum_in_clusters(
    rows: int, tile: MidTile, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    arguments = inputs((rows, 70, 64 * 12), "cpu", bias, torch.float16)
    compare_add(mid_add.implementation("cuda"), arguments, *adding((rows, 70, 0), "cpu", torch.float16), tile)


TABLE_COPYING = {
    (kind, tile): inputs for (kind, _, inputs), found in SHIPPED.items() for tile in found.values() if tile.producer
}
"""(op, tile with a copying warp) -> K."""


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*COPYING, *(tile for kind, tile in TABLE_COPYING if kind != "mid_add")], ids=repr)
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_every_copying_warp(tile: MidTile, rows: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided rows, many tiles a program; the same twice and whatever other rows there are; nothing beside it."""
    from headway.kernels.mid_linear.hopper.launch import launch

    x = make_random(rows, 4096 + 64, dtype=torch.bfloat16, device=hopper)[:, 32 : 32 + 4096]
    _, weight, bias = inputs((1, 20_000, 4096), hopper, True)
    squares = sums(64, x)
    for silu, meaning in ((False, reference.mid_linear), (True, reference.mid_gate_up)):
        outputs = 10_000 if silu else 20_000
        around = torch.full((2 + rows, outputs), 7.0, dtype=torch.bfloat16, device=hopper)
        out = around[1:-1]
        launch(x, weight, bias, out, tile, squares, EPS, gate=int(silu))
        assert_close(out, meaning(x, weight, bias, squares, EPS))
        assert bool((around[0] == 7.0).all()) and bool((around[-1] == 7.0).all())
        first, fewer = out.clone(), torch.empty_like(out[:1])
        for _ in range(10):
            launch(x, weight, bias, out, tile, squares, EPS, gate=int(silu))
            assert torch.equal(out, first), "a moving result would be a race"
        launch(x[-1:], weight, bias, fewer, tile, squares[:, -1:].contiguous(), EPS, gate=int(silu))
        assert torch.equal(fewer, first[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [*COPYING_CLUSTERS, *(tile for kind, tile in TABLE_COPYING if kind == "mid_add")], ids=repr
)
@pytest.mark.parametrize("rows", [1, 3, 9, 64])
def test_every_copying_cluster(tile: MidTile, rows: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cluster(tile, rows, hopper, monkeypatch)
