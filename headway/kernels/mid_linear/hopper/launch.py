"""Launches the kernels of the linear layers for 3 to 256 rows."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.mid_linear.hopper.triton import mid_add_kernel, mid_linear_kernel
from headway.kernels.mid_linear.hopper.triton_thin import thin_add_kernel, thin_linear_kernel
from headway.kernels.mid_linear.tiles import Kind, MidTile, tile_for
from headway.kernels.silu_mul import GATES
from headway.kernels.triton_early import launch_early
from headway.kernels.wide_linear.hopper.launch import weight_descriptor

PARTS = 64
"""Sums of squares of a row that a program loads together; fixed, so that a kernel does not depend on the tile before it."""


def mid_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    kind: Kind = "bare_linear" if squares is None else "mid_linear"
    launch(x, weight, bias, out, tile_for(kind, x.shape[0], *weight.shape), squares, eps)
    return out


def mid_gate_up(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor | None, eps: float,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    tile = tile_for("bare_gate_up" if squares is None else "mid_gate_up", x.shape[0], *weight.shape)
    launch(x, weight, bias, out, tile, squares, eps, gate=GATES.index(act) + 1)
    return out


def mid_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tile = tile_for("mid_add", x.shape[0], *weight.shape)
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    squares = torch.empty((tile.programs(weight.shape[0]), x.shape[0]), dtype=torch.float32, device=x.device)
    launch_add(x, weight, bias, residual, norm, out, squares, tile, factor)
    return out, squares


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tile = tile_for("linear_parts", x.shape[0], *weight.shape)
    out = torch.empty((tile.splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, tile)
    return out


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: MidTile,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    gate: int = 0,
) -> None:
    """out [T, N], or f32 [splits, T, N], from x [T, K]; ``gate``: the place of an activation in ``GATES``, from 1 on."""
    rows, inputs = x.shape
    outputs = out.shape[-1]
    _check(x, weight, out, (2 if gate else 1) * outputs, tile)
    assert (out.shape[0] if out.dim() == 3 else 1) == tile.splits and tile.cluster == 1, tile
    assert squares is None or (squares.shape[1:] == (rows,) and squares.dtype == torch.float32)
    assert squares is None or squares.is_contiguous()
    if rows == 0:
        return
    if tile.producer:
        _launch_thin(x, weight, bias, out, tile, squares, eps, gate)
        return
    block_n = tile.wide // 2 if gate else tile.wide
    mid_linear_kernel[(cdiv(outputs, block_n), tile.splits, cdiv(rows, tile.rows))](
        x, weight, x if bias is None else bias, out if squares is None else squares, out, rows,
        _number(squares), x.stride(0), eps, N=outputs, PARTS=0 if squares is None else PARTS, BIAS=bias is not None,
        GATE=gate, MORE=tile.widths()[1], **_constants(tile, inputs), **launch_early(x.device),
    )  # fmt: skip


def launch_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    tile: MidTile,
    factor: float = 1.0,
) -> None:
    """residual [T, N] in place, out [T, N] and squares f32 [programs, T] from x [T, K]."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    _check(x, weight, out, outputs, tile)
    assert residual.shape == out.shape == (rows, outputs) and residual.is_contiguous() and norm.is_contiguous()
    assert residual.dtype == norm.dtype == out.dtype == x.dtype and norm.shape == (outputs,)
    assert tile.splits == 1 and tile.widths()[1] == 0, tile
    assert (
        squares.shape == (tile.programs(outputs), rows) and squares.is_contiguous() and squares.dtype == torch.float32
    )
    assert residual.data_ptr() % 16 == 0 and norm.data_ptr() % 16 == 0
    if rows == 0:
        return
    if tile.producer:
        assert rows <= tile.rows
        thin_add_kernel[(tile.programs(outputs) * tile.cluster,)](
            _rows_of(x), weight_descriptor(weight, 1, tile.wide), x if bias is None else bias, residual, norm, out, squares,
            rows, N=outputs, K=inputs, STAGES=tile.w_ahead, CLUSTER=tile.cluster, BIAS=bias is not None, FACTOR=factor,
            num_warps=tile.num_warps, **registers(tile), **launch_early(x.device),
        )  # fmt: skip
        return
    mid_add_kernel[(tile.programs(outputs) * tile.cluster, 1, cdiv(rows, tile.rows))](
        x, weight, x if bias is None else bias, residual, norm, out, squares, rows, x.stride(0),
        N=outputs, CLUSTER=tile.cluster, BIAS=bias is not None, FACTOR=factor, **_constants(tile, inputs),
        **launch_early(x.device),
    )  # fmt: skip


def _launch_thin(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: MidTile,
    squares: torch.Tensor | None,
    eps: float,
    gate: int,
) -> None:
    """``launch`` with a producer warp."""
    rows, outputs = out.shape
    assert rows <= tile.rows and outputs % 8 == 0, "rows of the output begin at 16 bytes"
    pair = 2 if gate else 1
    block = tile.wide // pair
    tiles = cdiv(outputs, block)
    out_desc = TensorDescriptor(
        out, [rows, outputs], [outputs, 1], [tile.rows, block], NVMMASharedLayout(min(2 * block, 128), 16, 2)
    )
    programs = num_sms(x.device) * tile.residents(x.shape[1])
    thin_linear_kernel[(min(programs, tiles),)](
        _rows_of(x), weight_descriptor(weight, pair, tile.wide), out_desc, x if bias is None else bias,
        out if squares is None else squares, rows, _number(squares), eps, tiles, N=outputs, K=x.shape[1],
        PARTS=0 if squares is None else PARTS, STAGES=tile.w_ahead, BIAS=bias is not None, GATE=gate,
        num_warps=tile.num_warps, **registers(tile), **launch_early(x.device),
    )  # fmt: skip


def registers(tile: MidTile) -> dict[str, int]:
    """What limits them: programs of the kernel ahead or behind are to lie beside."""
    return {"maxnreg": 128} if tile.wide <= 128 else {}


def _number(squares: torch.Tensor | None) -> int:
    return 0 if squares is None else squares.shape[0]


def _rows_of(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [64, 64], NVMMASharedLayout(128, 16, 2))


def _check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, outputs: int, tile: MidTile) -> None:
    """What both kernels ask of their arguments."""
    assert x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype, "activations have 16 bits"
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0, "rows begin at 32 bytes"
    assert weight.shape == (outputs, x.shape[1]) and weight.is_contiguous() and out.is_contiguous()
    assert weight.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0 and tile.fits(x.shape[1]), tile


def _constants(tile: MidTile, inputs: int) -> dict[str, Any]:
    return {
        "K": inputs, "ROWS": tile.rows, "WIDE": tile.widths()[0], "BLOCK_K": tile.block_k, "CHUNKS": tile.chunks(inputs),
        "W_AHEAD": tile.w_ahead, "X_AHEAD": tile.x_ahead, "TRAILING": tile.trailing, "RING": tile.ring(inputs),
        "num_warps": tile.num_warps,
    }  # fmt: skip
