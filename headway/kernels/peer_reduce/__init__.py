"""Sums of small tensors over ranks whose GPUs see each other's memory: one kernel, with no signal beside the data.

peer_reduce_(x, parity, buffers, rank, size, start, two_shot)

    x        f32, bf16 or f16, contiguous; becomes the sum over all ranks, added up in float32 in the order of the ranks and
             rounded once, so all ranks have the same bits
    parity   int32 [U], zeros at first, kept by the op: which half of its place each unit uses next
    buffers  int64 [size + 1], addresses: every rank's buffer, then an int32 that ends all waiting when it is not 0
    rank, size  this rank, and how many
    start    where the region of these calls begins in every buffer, in bytes; a multiple of 16
    two_shot a rank sums a part and hands it to all, instead of every rank summing all; the same bits

peer_reduce_norm_(x, residual, weight, out, parity, buffers, rank, size, start, two_shot, eps, factor)

    x        [T, C], this rank's part of a product
    residual [T, C] in x's dtype, contiguous:  residual += factor * sum of x (each rounded to the dtype)
    weight   [C];  out [T, C] in x's dtype becomes rms_norm(residual, weight, eps), as ``add_rms_norm`` has it

x is cut into units: ``CHUNK`` elements, or a row of ``peer_reduce_norm_``. A region serves calls of one kind of unit, of one
number of bytes an element, and of at most U units: ``region_bytes``. It holds nothing but ``EMPTY`` at first:

    [2 halves, size + 1 lanes, U units, stride(elements of a unit)] elements

A rank writes its elements into the lane of its number in the buffers of the others, and waits for theirs in its own buffer. An
element has arrived when it is not EMPTY, a bit pattern that is never sent. So there is no flag beside the data, and nothing
has to be ordered. Whoever has read a place makes it EMPTY again. The two halves of a unit take turns: a half is written
again two calls later, and a peer begins that call only with what this rank sent in the call between, which it sent when it
had read and emptied the half. Lane ``size`` is for the sums of ``two_shot``.

Nothing is decided by the host, so calls are captured like any others. All ranks make the same calls in the same order.
"""

from __future__ import annotations

from headway.kernels.peer_reduce import reference
from headway.kernels.peer_reduce.reference import CHUNK, FILL, part, region_bytes, stride
from headway.kernels.registry import Op

__all__ = ["CHUNK", "FILL", "part", "peer_reduce_", "peer_reduce_norm_", "region_bytes", "stride"]

peer_reduce_ = Op(
    "peer_reduce_(Tensor(a!) x, Tensor(b!) parity, Tensor buffers, int rank, int size, int start, bool two_shot) -> ()",
    reference=reference.peer_reduce_,
    triton="headway.kernels.peer_reduce.triton:peer_reduce_",
)
peer_reduce_norm_ = Op(
    "peer_reduce_norm_(Tensor x, Tensor(a!) residual, Tensor weight, Tensor(b!) out, Tensor(c!) parity, Tensor buffers, "
    "int rank, int size, int start, bool two_shot, float eps, float factor) -> ()",
    reference=reference.peer_reduce_norm_,
    triton="headway.kernels.peer_reduce.triton:peer_reduce_norm_",
)
