"""Triton kernels of ``peer_gather_`` and ``peer_scatter_sum_``. Why they are right stands in ``peer_reduce.triton``: all that a
rank sends of its own it sends before it waits for anything, and each unit of a call goes to all ranks and comes from all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.peer_reduce.reference import CHUNK, EMPTY, stride
from headway.kernels.peer_reduce.triton import arrived, buffer_of, words_of
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

EMPTY_2, EMPTY_4 = tl.constexpr(EMPTY[2]), tl.constexpr(EMPTY[4])


@triton.jit(do_not_specialize=["num_units"])
def peer_exchange_kernel(
    x_ptr,  # [numel] to gather, [SIZE, numel] to scatter
    out_ptr,  # [SIZE, numel], or [numel]
    parity_ptr,
    buffers_ptr,
    start,
    units,  # of the region
    numel,
    num_units,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a unit
    STRIDE: tl.constexpr,
    SCATTER: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = dtype.primitive_bitwidth == 32
    EMPTY: tl.constexpr = EMPTY_4 if WIDE else EMPTY_2
    col = tl.arange(0, BLOCK)[None, :]
    first, step = tl.program_id(0), tl.num_programs(0)
    own = buffer_of(buffers_ptr, RANK, start, WIDE)  # nothing writes the addresses
    stop = tl.load(buffers_ptr + SIZE).to(tl.pointer_type(tl.int32))
    wait_for_inputs(EARLY)
    for unit in range(first, num_units, step):
        turn = tl.load(parity_ptr + unit)
        at = unit * BLOCK + col
        there = at < numel
        lane = (turn * (SIZE + 1) + RANK) * units + unit
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                words = words_of(tl.load(x_ptr + (peer * numel if SCATTER else 0) + at, mask=there, other=0))
                tl.store(buffer_of(buffers_ptr, peer, start, WIDE) + lane * STRIDE + col, words, mask=there)

    for unit in range(first, num_units, step):
        turn = tl.load(parity_ptr + unit)
        at = unit * BLOCK + col
        there = at < numel
        total = tl.zeros(at.shape, tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                words = words_of(tl.load(x_ptr + (RANK * numel if SCATTER else 0) + at, mask=there, other=0))
            else:
                lane = (turn * (SIZE + 1) + source) * units + unit
                words = arrived(own + lane * STRIDE + col, there, stop, EMPTY)
            came = words.to(dtype, bitcast=True)
            if SCATTER:
                total += came.to(tl.float32)
            else:
                tl.store(out_ptr + source * numel + at, came, mask=there)
        if SCATTER:
            tl.store(out_ptr + at, total.to(dtype), mask=there)
        tl.debug_barrier()  # all threads have read the turn
        tl.store(parity_ptr + unit, 1 - turn)


def peer_gather_(
    x: torch.Tensor, out: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int
) -> None:
    assert out.shape == (size, *x.shape)
    _launch(x, out, x.numel(), parity, buffers, (rank, size, start), scatter=False)


def peer_scatter_sum_(
    x: torch.Tensor, out: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int
) -> None:
    assert x.shape == (size, *out.shape)
    _launch(x, out, out.numel(), parity, buffers, (rank, size, start), scatter=True)


def _launch(
    x: torch.Tensor, out: torch.Tensor, numel: int, parity: torch.Tensor, buffers: torch.Tensor,
    place: tuple[int, int, int], *, scatter: bool,
) -> None:  # fmt: skip
    rank, size, start = place
    units = cdiv(numel, CHUNK)
    assert x.is_contiguous() and out.is_contiguous() and units <= len(parity) and start % 16 == 0
    if not units:
        return
    # No more programs than run at the same time: each waits for its peers.
    peer_exchange_kernel[(min(units, num_sms(x.device)),)](
        x, out, parity, buffers, start, len(parity), numel, units,
        RANK=rank, SIZE=size, BLOCK=CHUNK, STRIDE=stride(CHUNK), SCATTER=scatter, num_warps=8, **launch_early(x.device),
    )  # fmt: skip
