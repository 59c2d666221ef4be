"""Triton kernel of ``peer_reduce_`` and ``peer_reduce_norm_``: one program for a unit, or for several in turn.

Why it is right, where ranks share nothing but memory:

- *Nothing is read too early.* Each element says itself whether it has arrived: 2 or 4 bytes, aligned, written by one store
  and read by one load. Those are single on every card and link, whatever becomes of the 16 bytes that a thread moves at
  once. So no element depends on the order in which others arrive, and no fence is needed. Loads that wait are volatile:
  they are not answered by the L1 cache, and the compiler leaves them in their loop.
- *Nothing is emptied too early.* What ``arrived`` gives is emptied behind its last ``max`` over the program, which is a
  barrier: all threads have loaded by then, also those that hold the same element twice.
- *Nothing is written too early.* A rank writes a half of a unit in call n + 2 when it has ended call n + 1, for which it
  needed what this rank wrote then. This rank wrote that behind ``wait_for_inputs``, so its call n had ended, and the end of
  a kernel makes its stores visible: the half was empty again. Emptying and arriving meet in the memory of one card, whose
  L2 cache is the one place that both go through.
- *Nobody waits in a circle.* All that a rank sends of its own it sends before it waits for anything; with ``TWO`` it sends
  all sums of parts before it waits for one. Programs take units in the order of their numbers on every rank, and there are
  no more of them than multiprocessors. What starts early behind this kernel comes when all its programs run.
- *Early starts.* Every program waits for the kernel before, then reads x, residual and parity, and stores; addresses and the
  norm's weight it has by then. What starts early behind it reads weights alone until this kernel has ended.

A rank that has gone would be waited for without end; so the loop looks at ``buffers[size]`` now and then, which the host sets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.peer_reduce.reference import CHUNK, EMPTY, part, stride
from headway.kernels.rms_norm.triton import normed
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

EMPTY_2, EMPTY_4 = tl.constexpr(EMPTY[2]), tl.constexpr(EMPTY[4])
LOOKS = tl.constexpr(4096)
"""Looks at memory between two looks at the host's word."""


@triton.jit
def words_of(x):
    """Elements as whole numbers, none of which is EMPTY."""
    if x.dtype.primitive_bitwidth == 32:
        words = x.to(tl.int32, bitcast=True)
        return tl.where(words == EMPTY_4, 0, words)
    else:
        words = x.to(tl.int16, bitcast=True)
        return tl.where(words == EMPTY_2, 0, words).to(tl.int16)


@triton.jit
def buffer_of(buffers_ptr, rank: tl.constexpr, start, WIDE: tl.constexpr):
    """A rank's region."""
    address = tl.load(buffers_ptr + rank) + start
    if WIDE:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def arrived(place, there, stop, EMPTY: tl.constexpr):
    """The words at ``place`` once all have arrived; the place is empty again."""
    words = tl.load(place, mask=there, other=0, volatile=True)
    missing = tl.max((words == EMPTY).to(tl.int32))
    looks = 0
    while missing > 0:
        words = tl.load(place, mask=there, other=0, volatile=True)
        missing = tl.max((words == EMPTY).to(tl.int32))
        looks += 1
        if looks % LOOKS == 0:
            if tl.load(stop, volatile=True) != 0:
                missing = 0
    tl.store(place, tl.full(words.shape, EMPTY, words.dtype), mask=there)
    return words


@triton.jit
def summed(
    x_ptr, own, at, col, there, turn, unit, units, stop, RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    EMPTY: tl.constexpr,
):  # fmt: skip
    """The sum of elements ``at`` of x, columns ``col`` of ``unit``, over the ranks; f32."""
    total = tl.zeros(at.shape, tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            words = words_of(tl.load(x_ptr + at, mask=there, other=0.0))
        else:
            lane = (turn * (SIZE + 1) + source) * units + unit
            words = arrived(own + lane * STRIDE + col, there, stop, EMPTY)
        total += words.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_units"])
def peer_reduce_kernel(
    x_ptr,  # written, too, but when NORM
    residual_ptr,  # [T, C] when NORM
    weight_ptr,  # [C] when NORM
    out_ptr,  # [T, C] when NORM
    parity_ptr,
    buffers_ptr,
    start,
    units,  # of the region
    numel,
    num_units,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    COLS: tl.constexpr,
    STRIDE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    TWO: tl.constexpr,
    NORM: tl.constexpr,
    FACTOR: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    WIDE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 32
    EMPTY: tl.constexpr = EMPTY_4 if WIDE else EMPTY_2
    col = tl.arange(0, BLOCK)[None, :]
    if NORM:
        weight = tl.load(weight_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    own = buffer_of(buffers_ptr, RANK, start, WIDE)  # nothing writes the addresses
    stop = tl.load(buffers_ptr + SIZE).to(tl.pointer_type(tl.int32))
    wait_for_inputs(EARLY)
    for unit in range(first, num_units, step):
        turn = tl.load(parity_ptr + unit)
        at = unit * COLS + col
        there = (col < COLS) if NORM else (at < numel)
        words = words_of(tl.load(x_ptr + at, mask=there, other=0.0))
        lane = (turn * (SIZE + 1) + RANK) * units + unit
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                sent = there & (col >= peer * PART) & (col < (peer + 1) * PART) if TWO else there
                tl.store(buffer_of(buffers_ptr, peer, start, WIDE) + lane * STRIDE + col, words, mask=sent)

    if TWO:
        mine = RANK * PART + tl.arange(0, PART_BLOCK)[None, :]
        for unit in range(first, num_units, step):
            turn = tl.load(parity_ptr + unit)
            at = unit * COLS + mine
            there = (mine < (RANK + 1) * PART) & (mine < COLS)
            if not NORM:
                there = there & (at < numel)
            total = summed(x_ptr, own, at, mine, there, turn, unit, units, stop, RANK, SIZE, STRIDE, EMPTY)
            words = words_of(total.to(x_ptr.dtype.element_ty))
            lane = (turn * (SIZE + 1) + SIZE) * units + unit
            for peer in tl.static_range(SIZE):
                tl.store(buffer_of(buffers_ptr, peer, start, WIDE) + lane * STRIDE + mine, words, mask=there)

    for unit in range(first, num_units, step):
        turn = tl.load(parity_ptr + unit)
        at = unit * COLS + col
        there = (col < COLS) if NORM else (at < numel)
        if NORM:
            residual = tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
        if TWO:
            lane = (turn * (SIZE + 1) + SIZE) * units + unit
            words = arrived(own + lane * STRIDE + col, there, stop, EMPTY)
            narrow = words.to(x_ptr.dtype.element_ty, bitcast=True)
        else:
            total = summed(x_ptr, own, at, col, there, turn, unit, units, stop, RANK, SIZE, STRIDE, EMPTY)
            narrow = total.to(x_ptr.dtype.element_ty)
        if NORM:
            x = narrow.to(tl.float32)
            if FACTOR != 1.0:
                x = (x * FACTOR).to(narrow.dtype).to(tl.float32)
            narrow = (x + residual).to(narrow.dtype)
            tl.store(residual_ptr + at, narrow, mask=there)
            tl.store(out_ptr + at, normed(narrow.to(tl.float32), weight, eps, COLS, narrow.dtype), mask=there)
        else:
            tl.store(x_ptr + at, narrow, mask=there)
        tl.debug_barrier()  # all threads have read the turn
        tl.store(parity_ptr + unit, 1 - turn)


def peer_reduce_(
    x: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int, two_shot: bool
) -> None:
    _launch(x, CHUNK, (x, x, x), parity, buffers, (rank, size, start, two_shot))


def peer_reduce_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parity: torch.Tensor,
    buffers: torch.Tensor, rank: int, size: int, start: int, two_shot: bool, eps: float, factor: float,
) -> None:  # fmt: skip
    assert x.shape == residual.shape == out.shape and residual.is_contiguous() and out.is_contiguous()
    _launch(x, x.shape[1], (residual, weight, out), parity, buffers, (rank, size, start, two_shot), eps, factor)


def _launch(
    x: torch.Tensor, elements: int, others: tuple[torch.Tensor, ...], parity: torch.Tensor, buffers: torch.Tensor,
    place: tuple[int, int, int, bool], eps: float | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    rank, size, start, two_shot = place
    units = cdiv(x.numel(), elements)
    assert x.is_contiguous() and units <= len(parity) and start % 16 == 0
    if not units:
        return
    own, block = part(elements, size), next_power_of_2(elements)
    # No more programs than run at the same time: each waits for its peers.
    peer_reduce_kernel[(min(units, num_sms(x.device)),)](
        x, *others, parity, buffers, start, len(parity), x.numel(), units, eps or 0.0,
        RANK=rank, SIZE=size, COLS=elements, STRIDE=stride(elements), PART=own, BLOCK=block,
        PART_BLOCK=next_power_of_2(own), TWO=two_shot, NORM=eps is not None, FACTOR=factor,
        num_warps=min(16, max(4, block // 256)), **launch_early(x.device),
    )  # fmt: skip
