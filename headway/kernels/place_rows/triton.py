"""Triton kernel of ``place_rows``: a program per row and block of columns; rows that stay cost one load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_features", "first"])
def place_kernel(
    x_ptr,
    features_ptr,
    rows_ptr,
    num_features,
    x_stride,
    feature_stride,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    token = tl.program_id(0)
    row = tl.load(rows_ptr + token)
    if (row >= 0) & (row < num_features):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        keep = column < SIZE
        found = tl.load(features_ptr + row.to(tl.int64) * feature_stride + first + column, mask=keep)
        own = x_ptr + token.to(tl.int64) * x_stride + column
        if ADD:
            found = (found.to(tl.float32) + tl.load(own, mask=keep).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(own, found, mask=keep)


def place_rows(x: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, first: int, add: bool) -> None:
    num_tokens, size = x.shape
    assert x.stride(1) == features.stride(1) == 1 and first + size <= features.shape[1]
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        place_kernel[(num_tokens, cdiv(size, block))](
            x, features, rows, features.shape[0], x.stride(0), features.stride(0), first,
            SIZE=size, BLOCK=block, ADD=add, num_warps=4,
        )  # fmt: skip
