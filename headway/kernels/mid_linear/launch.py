"""Launches the kernel of the linear layers for 3 to 256 rows."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv
from headway.kernels.mid_linear.tiles import MidTile, tile_for
from headway.kernels.mid_linear.triton import mid_linear_kernel
from headway.kernels.triton_early import launch_early


def mid_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, weight, bias, out, tile_for("mid_linear", x.shape[0], *weight.shape))
    return out


def mid_gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch(x, weight, bias, out, tile_for("mid_gate_up", x.shape[0], *weight.shape), silu=True)
    return out


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
    *,
    silu: bool = False,
) -> None:
    """out [T, N], or f32 [splits, T, N], from x [T, K]."""
    rows, inputs = x.shape
    outputs = out.shape[-1]
    assert x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype, "activations have 16 bits"
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0, "rows begin at 32 bytes"
    assert weight.shape == ((2 if silu else 1) * outputs, inputs) and weight.is_contiguous() and out.is_contiguous()
    assert weight.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    assert (out.shape[0] if out.dim() == 3 else 1) == tile.splits and tile.fits(inputs), tile
    if rows == 0:
        return
    block_n = tile.wide // 2 if silu else tile.wide
    mid_linear_kernel[(cdiv(outputs, block_n), tile.splits, cdiv(rows, tile.rows))](
        x, weight, x if bias is None else bias, out, rows, x.stride(0),
        N=outputs, K=inputs, ROWS=tile.rows, WIDE=tile.wide, BLOCK_K=tile.block_k, CHUNKS=tile.chunks(inputs),
        W_AHEAD=tile.w_ahead, X_AHEAD=tile.x_ahead, TRAILING=tile.trailing, RING=tile.ring(inputs),
        BIAS=bias is not None, SILU=silu,
        num_warps=tile.num_warps, **launch_early(x.device),
    )  # fmt: skip
