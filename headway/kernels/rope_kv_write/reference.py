"""The meaning of ``rope_kv_write``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.rms_norm.reference import rms_norm


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    kv_heads, size = k_cache.shape[2:]
    q, k, v = qkv.unflatten(1, (-1, size)).split([num_heads, kv_heads, kv_heads], dim=1)
    turn = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)]
    q = rotate(q if q_norm is None else rms_norm(q, q_norm, eps), turn)
    k = rotate(k if k_norm is None else rms_norm(k, k_norm, eps), turn)
    write_rows(k_cache, kv_slots, k)
    write_rows(v_cache, kv_slots, v)
    return q


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Heads x [T, H, D], turned by ``turn`` [T, Drot]: rows of cos_sin."""
    half = turn.shape[1] // 2
    cos, sin = turn[:, None, :half], turn[:, None, half:]  # [T, 1, Drot / 2]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def as_cached(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``new`` in a cache's dtype; 8-bit floats end at their largest value, where torch would make NaN of more."""
    if dtype is torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        new = new.clamp(-limit, limit)
    return new.to(dtype)


def write_rows(cache: torch.Tensor, kv_slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write ``new`` [T, ...] at the valid slots of ``cache`` [NB, bs, ...].

    A token without a slot repeats the write of the first token that has one (same place, same bytes), because dropping
    it would need a data-dependent shape; when no token has a slot, place 0 is rewritten with its own content.
    """
    if new.shape[0] == 0:
        return
    block_size = cache.shape[1]
    slots = kv_slots.long()
    valid = (slots >= 0) & (slots < cache.shape[0] * block_size)  # [T]
    first = valid.long().argmax().view(1)  # 0 when none is valid
    slots = torch.where(valid, slots, slots[first].clamp(0, cache.shape[0] * block_size - 1))
    place = (slots // block_size, slots % block_size)
    new = as_cached(new, cache.dtype)
    if cache.itemsize == 1:  # torch does not select among 8-bit floats on every device
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    each = (-1, *[1] * (new.dim() - 1))
    spare = torch.where(valid[first].view(each), new[first], cache[place[0][first], place[1][first]])
    cache[place] = torch.where(valid.view(each), new, spare)
