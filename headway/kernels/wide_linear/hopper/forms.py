"""Launches ``wide_gelu`` in forms that ``bench/ops/wide_gelu.py`` compares."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.triton_early import launch_early
from headway.kernels.wide_linear.hopper.launch import FLAT, weight_descriptor
from headway.kernels.wide_linear.hopper.triton import sums_kernel
from headway.kernels.wide_linear.hopper.triton_forms import early_kernel, turns_kernel
from headway.kernels.wide_linear.tiles import BLOCK_K, BLOCK_M, GROUP, STAGES

TURN_STAGES = 5
ERF = 3


def launch_form(
    form: str,
    wide: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    group: int = GROUP,
) -> None:
    """out [T, N] by the ``form`` old, early, late2, late4 or turns, in tiles of ``wide`` weight rows; as ``launch_sums``."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(outputs, wide)
    grid = (min(num_sms(x.device), tiles_m * tiles_n),)
    x_desc = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [BLOCK_M, BLOCK_K], FLAT)
    w_desc = weight_descriptor(weight, 1, wide)
    sizes = {"N": outputs, "K": inputs, "GROUP": group, "num_warps": 4, **launch_early(x.device)}
    if form == "turns":
        out_desc = TensorDescriptor(out, list(out.shape), [outputs, 1], [BLOCK_M, wide], FLAT)
        turns_kernel[grid](x_desc, w_desc, out_desc, bias, tiles_m, tiles_n, STAGES=TURN_STAGES, **sizes)
    elif form.startswith("late"):
        sums_kernel[grid](
            x_desc,
            w_desc,
            out,
            bias,
            rows,
            tiles_m,
            tiles_n,
            STAGES=STAGES[wide],
            GELU=ERF,
            FACTOR=1.0,
            WARPS=int(form[4:]),
            **sizes,
        )
    else:
        early_kernel[grid](
            x_desc, w_desc, out, bias, rows, tiles_m, tiles_n, STAGES=STAGES[wide], OLD=form == "old", **sizes
        )
