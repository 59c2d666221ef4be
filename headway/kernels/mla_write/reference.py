"""The meaning of ``mla_write``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.rms_norm.reference import rms_norm
from headway.kernels.rope_kv_write.reference import as_cached, rotate, write_rows


def mla_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    kv_slots: torch.Tensor,
    latents: torch.Tensor,
) -> torch.Tensor:
    rank, rotated = norm.shape[0], cos_sin.shape[1]
    turn = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]
    q[..., -rotated:] = rotate(q[..., -rotated:], turn)
    key = rotate(kv[:, None, rank:], turn)[:, 0]
    latent = torch.cat([rms_norm(kv[:, :rank], norm, eps), key], dim=1)
    write_rows(latents, kv_slots, latent)
    return as_cached(latent, latents.dtype).to(kv.dtype)
