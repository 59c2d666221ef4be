"""Triton kernel of ``peer_reduce_``: a program per chunk, each with signals of its own, so that no program waits for another.

All programs must be on the device at once, since each waits for its peers' one: the host side caps their number at what any
card has multiprocessors for. It has not run on a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv
from headway.kernels.peer_reduce.reference import CHUNK

MOST_CHUNKS = 64
"""Programs that surely run at the same time."""


@triton.jit
def peer_reduce_kernel(
    x_ptr,
    epochs_ptr,
    buffers_ptr,
    pads_ptr,
    numel,
    room,
    num_pads,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    epoch = tl.load(epochs_ptr + chunk) + 1
    half = (epoch % 2).to(tl.int64) * room  # in elements
    mine = tl.load(buffers_ptr + RANK).to(x_ptr.dtype)
    tl.store(mine + half + at, tl.load(x_ptr + at, mask=mask), mask=mask)
    tl.debug_barrier()  # all of the program's stores, then the signals
    for peer in tl.static_range(SIZE):
        pad = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad + RANK * num_pads + chunk, epoch, sem="release", scope="sys")
    own = tl.load(pads_ptr + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        while tl.atomic_add(own + peer * num_pads + chunk, 0, sem="acquire", scope="sys") < epoch:
            pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        theirs = tl.load(buffers_ptr + peer).to(x_ptr.dtype)
        total += tl.load(theirs + half + at, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(x_ptr + at, total.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(epochs_ptr + chunk, epoch)


def peer_reduce_(
    x: torch.Tensor,
    epochs: torch.Tensor,
    buffers: torch.Tensor,
    pads: torch.Tensor,
    rank: int,
    size: int,
    room: int,
) -> None:
    chunks = cdiv(x.numel(), CHUNK)
    assert x.is_contiguous() and chunks <= min(MOST_CHUNKS, len(epochs)) and x.nbytes <= room
    if chunks:
        peer_reduce_kernel[(chunks,)](
            x,
            epochs,
            buffers,
            pads,
            x.numel(),
            room // x.itemsize,
            len(epochs),
            RANK=rank,
            SIZE=size,
            BLOCK=CHUNK,
            num_warps=4,
        )
