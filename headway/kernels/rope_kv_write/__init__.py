"""Everything between the QKV projection and attention, in one launch: q/k norm, rotary embedding, KV cache write.

rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads) -> q
    qkv        [T, (H + 2 * KH) * D] activations, row = (q heads, k heads, v heads), last dimension contiguous; H is 0 where
               there are keys and values alone
    positions  int32 [T]; a position outside the table is clamped to it
    cos_sin    f32 [L, Drot], row = (cos [Drot / 2], sin [Drot / 2]); Drot even, <= D
    q_norm, k_norm  [D] weights of a per-head RMS norm before the rotation (Qwen3), rounded as in ``rms_norm``; or None
    kv_slots   int32 [T], block * block_size + offset; a slot outside [0, NB * bs) (-1 on padding) writes nothing
    k_cache, v_cache [NB, bs, KH, D], head dimensions contiguous; written in place, everything else is left alone; KH is 0 where
               there are queries alone. In qkv's
               dtype, or float8_e4m3fn: that takes what qkv's dtype would hold, and what is beyond +-448 as +-448
    q          [T, H, D] normalised and rotated queries, in qkv's dtype

The rotation is NeoX's (half-split, Su et al. 2021): for i < Drot / 2 the pair (x[i], x[i + Drot / 2]) turns by the
angle of cos_sin[position, i]; elements from Drot on pass through. Products are f32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.registry import Op
from headway.kernels.rope_kv_write import reference


def _rope_kv_write_meta(qkv: torch.Tensor, *others: Any) -> torch.Tensor:
    *_, k_cache, _, num_heads = others
    return torch.empty((qkv.shape[0], num_heads, k_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)


rope_kv_write = Op(
    "rope_kv_write(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor kv_slots, Tensor(a!) k_cache, Tensor(b!) v_cache, int num_heads) -> Tensor",
    reference=reference.rope_kv_write,
    meta=_rope_kv_write_meta,
    triton="headway.kernels.rope_kv_write.triton:rope_kv_write",
    cpu="headway.kernels.cpu.ops:rope_kv_write",
)
