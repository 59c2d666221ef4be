"""The meaning of ``dense_rope``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.rms_norm.reference import rms_norm


def dense_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    q, k, _ = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    turn = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]
    half = turn.shape[1] // 2
    cos, sin = turn[:, None, :half], turn[:, None, half:]  # [T, 1, Drot / 2]
    for x, norm in ((q, q_norm), (k, k_norm)):
        normed = x if norm is None else rms_norm(x, norm, eps)
        first, second = normed[..., :half].float(), normed[..., half : 2 * half].float()
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
        if norm is not None:
            x[..., 2 * half :] = normed[..., 2 * half :]
        x[..., : 2 * half] = turned
