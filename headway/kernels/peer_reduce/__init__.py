"""``peer_reduce_``: the sum of a small tensor over ranks whose GPUs see each other's memory, in one kernel (one-shot
all-reduce).

peer_reduce_(x, epochs, buffers, pads, rank, size)

    x        f32, bf16 or f16, contiguous, n elements in chunks of ``CHUNK``; becomes the sum over all ranks, added up in
    float32
             in the order of the ranks, so that all have the same bits
    epochs   int32 [at least as many as chunks], zeros at first; each chunk's number of calls so far, kept by the op
    buffers  int64 [size], addresses of every rank's room: 2 * room bytes, where room is at least that of x
    pads     int64 [size], addresses of every rank's signals: int32 [size, chunks], zeros at first
    rank, size, room  this rank, how many, and half of a buffer's bytes

A rank writes each chunk into its own buffer, sets its signal for it in every rank's pads to the chunk's epoch, waits until all
others' signals in its own pads have come as far, and reads their buffers. Two halves take turns: a half is written again two
calls later, and by then every rank has begun the call between, which it does only when it has read all of this one. Nothing
is decided by the host, so the op is captured like any other.

Only for messages so small that their way is longer than they are: each rank reads all others' whole.
"""

from __future__ import annotations

from headway.kernels.peer_reduce.reference import CHUNK
from headway.kernels.peer_reduce.reference import peer_reduce_ as _reference
from headway.kernels.registry import Op

__all__ = ["CHUNK", "peer_reduce_"]

peer_reduce_ = Op(
    "peer_reduce_(Tensor(a!) x, Tensor(b!) epochs, Tensor buffers, Tensor pads, int rank, int size, int room) -> ()",
    reference=_reference,
    meta=lambda *args: None,
    triton="headway.kernels.peer_reduce.triton:peer_reduce_",
)
