"""Triton kernel of ``store_rows``: a program per row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_places"])
def store_kernel(
    table_ptr, places_ptr, rows_ptr, num_places, table_stride, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.load(places_ptr + row)
    if (place >= 0) & (place < num_places):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(rows_ptr + row.to(tl.int64) * row_stride + column, mask=column < SIZE)
        tl.store(table_ptr + place.to(tl.int64) * table_stride + column, values, mask=column < SIZE)


def store_rows(table: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    number, size = rows.shape
    assert table.stride(1) == rows.stride(1) == 1 and size <= table.shape[1]
    block = min(1024, next_power_of_2(size))
    if number:
        store_kernel[(number, cdiv(size, block))](
            table, places, rows, table.shape[0], table.stride(0), rows.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
