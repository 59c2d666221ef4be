"""Rotary embedding of queries and keys where they stand, each head normalised first where the model does that.

dense_rope(qkv, positions, cos_sin, q_norm, k_norm, eps, num_heads, num_kv_heads)
    qkv        [T, (H + 2 KH) * D] f32, f16 or bf16, last dimension contiguous; queries and keys are written, values are not
    positions  int32 [T]; those outside of [0, L) count as the nearest inside
    cos_sin    f32 [L, Drot] contiguous, see ``models.rope``
    q_norm, k_norm  [D] RMS norms' weights, or None
    eps        of those norms
"""

from __future__ import annotations

from headway.kernels.dense_rope import reference
from headway.kernels.registry import Op

dense_rope = Op(
    "dense_rope(Tensor(a!) qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, int num_heads, "
    "int num_kv_heads) -> ()",
    reference=reference.dense_rope,
    triton="headway.kernels.dense_rope.triton:dense_rope",
)
