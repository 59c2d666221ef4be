"""Native CPU implementations of what encoders need beside products; see ``headway.kernels.cpu.ops``."""

from __future__ import annotations

import functools

import torch

from headway.kernels.cpu.ops import available, is_native, native
from headway.kernels.registry import OPS

__all__ = ["add_layer_norm", "available", "serves", "short_attention"]

MOST_KEYS, MOST_SIZE = 512, 128
"""Tokens of a text, and numbers of a head, that the kernel has room for; encoder.c knows the same."""


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    given = (x, residual, weight) if bias is None else (x, residual, weight, bias)
    if not is_native(*given) or x.shape != residual.shape:
        found: torch.Tensor = OPS["add_layer_norm"].reference(x, residual, weight, bias, eps)
        return found
    out, size = torch.empty_like(residual), x.shape[-1]
    native().headway_add_layer_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        x.numel() // max(size, 1), size, eps, x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def serves(qkv: torch.Tensor, query_start: torch.Tensor, size: int) -> bool:
    """Whether ``short_attention`` can: heads of ``size`` numbers fit its vectors."""
    if not available() or not is_native(qkv) or query_start.dtype is not torch.int32 or not query_start.is_contiguous():
        return False
    return size <= MOST_SIZE and size % _lanes() == 0


def short_attention(
    out: torch.Tensor,
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    most: int,
) -> None:
    """``dense_attention`` of the rows of up to ``most`` tokens, at most ``MOST_KEYS``, which see all of each other."""
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    native().headway_dense_attention(
        qkv.data_ptr(), query_start.data_ptr(), out.data_ptr(), len(query_start) - 1, num_heads, num_kv_heads, size,
        most, scale, qkv.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


@functools.cache
def _lanes() -> int:
    """Numbers of a vector that the kernels were built for."""
    found: int = native().headway_dense_attention(None, None, None, 0, 1, 1, 0, 0, 0.0, 0, 1)
    return found
