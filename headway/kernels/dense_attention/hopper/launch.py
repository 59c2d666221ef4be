"""Launches ``dense_attention`` by Hopper's warpgroup products."""

from __future__ import annotations

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.dense_attention.hopper.triton import ROWS, overlapped_dense_kernel

REGISTERS = 128
"""Of a thread: four programs share an SM."""


def launch_overlapped(
    qkv: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    longest: int,
) -> None:
    """out [T, H * D] as ``dense_attention`` without bias, reach and cap; 16 bits, D = 64."""
    block = [ROWS.value, out.shape[1] // heads]
    qkv_desc = TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], block, NVMMASharedLayout(128, 16, 2))
    overlapped_dense_kernel[(cdiv(longest, ROWS.value), heads, len(starts) - 1)](
        qkv_desc, starts, out, qkv.shape[0], scale, H=heads, KH=kv_heads, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
