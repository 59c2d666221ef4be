"""Launches ``dense_attention`` in forms that ``bench/ops/dense_attention.py`` compares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.dense_attention.hopper.triton import ROWS, dense_alone_kernel, dense_tiles_kernel


class Form(NamedTuple):
    """Warpgroups of a program (0: one, without a warp that copies), keys of a tile, tiles that there is memory for, registers
    a thread is launched with."""

    groups: int
    keys: int
    stages: int
    registers: int


def launch_dense(
    form: Form,
    qkv: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    longest: int,
) -> None:
    """out [T, H * D] as ``dense_attention`` without bias, reach and cap; heads of 64 or 128."""
    size = out.shape[1] // heads
    layout = NVMMASharedLayout(128, 16, 2)
    q_desc, kv_desc = (
        TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], [rows, size], layout)
        for rows in (ROWS.value, form.keys)
    )
    if form.groups == 0:
        dense_alone_kernel[(cdiv(longest, ROWS.value), heads, len(starts) - 1)](
            q_desc, kv_desc, starts, out, qkv.shape[0], scale, H=heads, KH=kv_heads, STAGES=form.stages, num_warps=4,
            maxnreg=form.registers,
        )  # fmt: skip
        return
    dense_tiles_kernel[(cdiv(longest, form.groups * ROWS.value), heads, len(starts) - 1)](
        q_desc, kv_desc, starts, out, qkv.shape[0], scale, H=heads, KH=kv_heads, GROUPS=form.groups, STAGES=form.stages,
        REGISTERS=form.registers, num_warps=4, maxnreg=form.registers,
    )  # fmt: skip
