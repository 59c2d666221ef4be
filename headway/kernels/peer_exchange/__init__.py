"""What replicas that share experts exchange in each layer, through peers' memory: as ``peer_reduce`` moves its sums.

peer_gather_(x, out, parity, buffers, rank, size, start)

    x        f32, bf16, f16 or int32, contiguous, as large on all ranks
    out      [size, *x.shape] in x's dtype, contiguous: becomes x of every rank, by rank. Of int32 the number EMPTY,
             -2147450880, arrives as 0, of floats -0.0 (f32: -4.6e-41) does; so all ranks have the same bits

peer_scatter_sum_(x, out, parity, buffers, rank, size, start)

    x        [size, ...] f32, bf16 or f16, contiguous: for each rank its part
    out      [...] in x's dtype, contiguous: becomes the sum of what all ranks have for this one, added up in float32 in the
             order of the ranks and rounded once

The other arguments, units, lanes and regions are those of ``peer_reduce_``, and so is why it is right: in every call a rank
sends to all others, and waits for all of them, unit by unit. Units are of ``CHUNK`` elements of x, or of a rank's part. Calls
of all kinds may take turns in one region.
"""

from __future__ import annotations

from headway.kernels.peer_exchange import reference
from headway.kernels.registry import Op

__all__ = ["peer_gather_", "peer_scatter_sum_"]

peer_gather_ = Op(
    "peer_gather_(Tensor x, Tensor(a!) out, Tensor(b!) parity, Tensor buffers, int rank, int size, int start) -> ()",
    reference=reference.peer_gather_,
    triton="headway.kernels.peer_exchange.triton:peer_gather_",
)
peer_scatter_sum_ = Op(
    "peer_scatter_sum_(Tensor x, Tensor(a!) out, Tensor(b!) parity, Tensor buffers, int rank, int size, int start) -> ()",
    reference=reference.peer_scatter_sum_,
    triton="headway.kernels.peer_exchange.triton:peer_scatter_sum_",
)
