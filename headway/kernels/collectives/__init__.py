"""Collective operations: what ranks of one group do together, each on its own tensors.

All ranks of a group call the same operations in the same order, on tensors of the same shape and dtype. ``group`` is a number
of ``kernels.registry.TRANSPORTS``; ranks count from 0 within their group.

all_reduce_(x, group)           x becomes the sum of x over all ranks; the same bits on all of them
all_gather_(x, out, group)      out [size, *x.shape] becomes x of every rank, by rank
all_to_all_(x, out, group)      x [size, ...] -> out [size, ...]: what each rank has at our place, by rank
send_to(x, group, peer)         x goes to rank ``peer``, which receives it
receive_(x, group, peer)        x becomes what rank ``peer`` sent
post_(x, group, peer)           the same, but x is not to be touched until
finish_(x, group)               was called for it, in the order of the posts

All are contiguous. Nothing is allocated here: an exchange may run on a stream that its callers' memory does not belong to.

They are operations like any others, so they are captured in CUDA graphs, and the simulated device runs them when its stream
gets there. On a CPU they block until the other ranks have come; so a rank that never comes ends in the group's time-out.
"""

from __future__ import annotations

from headway.kernels.collectives import reference
from headway.kernels.registry import Op

all_reduce_ = Op(
    "all_reduce_(Tensor(a!) x, int group) -> ()",
    reference=reference.all_reduce_,
)


all_gather_ = Op(
    "all_gather_(Tensor x, Tensor(a!) out, int group) -> ()",
    reference=reference.all_gather_,
)

all_to_all_ = Op(
    "all_to_all_(Tensor x, Tensor(a!) out, int group) -> ()",
    reference=reference.all_to_all_,
)

send_to = Op(
    "send_to(Tensor x, int group, int peer) -> ()",
    reference=reference.send_to,
)

receive_ = Op(
    "receive_(Tensor(a!) x, int group, int peer) -> ()",
    reference=reference.receive_,
)

post_ = Op(
    "post_(Tensor(a!) x, int group, int peer) -> ()",
    reference=reference.post_,
)

finish_ = Op(
    "finish_(Tensor(a!) x, int group) -> ()",
    reference=reference.finish_,
)
