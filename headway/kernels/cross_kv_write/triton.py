"""``cross_kv_write`` in Triton: a program per encoder output and block of its elements; reads and writes are contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_places"])
def cross_kv_write_kernel(
    kv,
    places,
    k_cache,
    v_cache,
    num_places,
    row_stride,
    block_stride,
    token_stride,
    head_stride,
    WIDTH: tl.constexpr,  # KH * D
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if (place >= 0) & (place < num_places):
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        keep = element < WIDTH
        at = (place // BS).to(tl.int64) * block_stride + (place % BS) * token_stride
        at = at + element // D * head_stride + element % D
        k = tl.load(kv + row * row_stride + element, mask=keep)
        v = tl.load(kv + row * row_stride + WIDTH + element, mask=keep)
        tl.store(k_cache + at, k.to(k_cache.dtype.element_ty), mask=keep)
        tl.store(v_cache + at, v.to(v_cache.dtype.element_ty), mask=keep)


def cross_kv_write(kv: torch.Tensor, places: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    assert kv.stride(1) == 1 and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    num_blocks, block_size, kv_heads, size = k_cache.shape
    width = kv_heads * size
    block = min(1024, next_power_of_2(width))
    if kv.shape[0]:
        cross_kv_write_kernel[(kv.shape[0], cdiv(width, block))](
            kv, places, k_cache, v_cache, num_blocks * block_size, kv.stride(0), k_cache.stride(0), k_cache.stride(1),
            k_cache.stride(2), WIDTH=width, D=size, BS=block_size, BLOCK=block, num_warps=4,
        )  # fmt: skip
