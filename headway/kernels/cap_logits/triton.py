"""Triton kernel of ``cap_logits``: element-wise, 16-byte accesses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

BLOCK = 2048
TWICE_LOG2E = tl.constexpr(2.885390081777927)


@triton.jit
def cap_logits_kernel(
    logits_ptr,  # [N, SIZE], in place
    row_stride,
    factor,
    cap,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: N, parts of a row."""
    start_next(EARLY)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride + col
    wait_for_inputs(EARLY)
    narrow = tl.load(at, mask=col < SIZE, other=0.0)
    x = narrow.to(tl.float32) * factor
    if CAPPED:
        x = cap * (1.0 - 2.0 / (tl.exp2(x * (TWICE_LOG2E / cap)) + 1.0))
    tl.store(at, x.to(narrow.dtype), mask=col < SIZE)


def cap_logits(logits: torch.Tensor, factor: float, cap: float) -> None:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "rows must be contiguous"
    if num_rows:
        cap_logits_kernel[(num_rows, cdiv(size, BLOCK))](
            logits, logits.stride(0), float(factor), float(cap or 1.0), SIZE=size, BLOCK=BLOCK, CAPPED=cap > 0,
            num_warps=8, **launch_early(logits.device),
        )  # fmt: skip
