"""What stands between the projections of latent attention and its scores: the latents' norm, rotations, and the write to the
cache.

mla_write(q, kv, positions, cos_sin, norm, eps, kv_slots, latents) -> latent
    q          [T, H, D] queries, last dimension contiguous; the last Dr of each head are rotated in place
    kv         [T, L + Dr] projections, last dimension contiguous: L to be normalised, and the key part that all heads share
    positions  int32 [T]; a position outside the table is clamped to it
    cos_sin    f32 [P, Dr], row = (cos [Dr / 2], sin [Dr / 2]); Dr even, <= D
    norm, eps  [L], of an RMS norm, rounded as in ``rms_norm``
    kv_slots   int32 [T], block * block_size + offset; a slot outside [0, NB * bs) (-1 on padding) writes nothing
    latents    [NB, bs, L + Dr], last dimension contiguous; written in place, everything else is left alone. In kv's dtype, or
               float8_e4m3fn: that takes what kv's dtype would hold, and what is beyond +-448 as +-448
    latent     [T, L + Dr] in kv's dtype: what the cache has of each token, or would have if it had a slot

The rotation is that of ``rope_kv_write`` for a head of size Dr. Products are f32, rounded once.
"""

from __future__ import annotations

import torch

from headway.kernels.mla_write import reference
from headway.kernels.registry import Op


def _mla_write_meta(q: torch.Tensor, kv: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)


mla_write = Op(
    "mla_write(Tensor(a!) q, Tensor kv, Tensor positions, Tensor cos_sin, Tensor norm, float eps, Tensor kv_slots, "
    "Tensor(b!) latents) -> Tensor",
    reference=reference.mla_write,
    meta=_mla_write_meta,
    triton="headway.kernels.mla_write.triton:mla_write",
)
