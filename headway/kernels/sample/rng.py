"""The stateless random numbers of ``sample``, in torch: 32 random bits per (seed, position, token).

The finaliser is lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018). A row has two keys, each a chain of
finalisers over seed and position in a different order; two rows share their noise only if both 32-bit keys collide.
The second key goes in between two multiplications, so that rows whose first keys are close do not see shifted copies
of the same noise. Unsigned arithmetic is done in int32: products wrap, and shifts are masked to be logical.
"""

from __future__ import annotations

import torch


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _xorshift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits (logical), in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32, in place."""
    x = _xorshift(x, 16).mul_(0x7FEB352D)
    x = _xorshift(x, 15).mul_(_signed(0x846CA68B))
    return _xorshift(x, 16)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 keys per row.

    Args:
        seeds: int32 [N, 2], low and high word.
        positions: int32 [N].
    """
    low, high = seeds.unbind(1)
    first = _mix(_mix(_mix(low + _signed(0x9E3779B9)) ^ high) + positions)
    second = _mix(_mix(_mix(positions + _signed(0x85EBCA6B)) ^ high) + low)
    return first, second


def token_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """int32 [N, V]: 32 random bits for each token of each row. Arguments as in ``row_keys``."""
    first, second = row_keys(seeds, positions)
    token = torch.arange(vocab, dtype=torch.int32, device=seeds.device).mul_(_signed(0x9E3779B1))
    x = _xorshift(token ^ first[:, None], 16).mul_(0x21F0AAAD).add_(second[:, None])
    return _mix(x)


def log_exponential(bits: torch.Tensor) -> torch.Tensor:
    """f32 log(E) with E ~ Exponential(1), E = -log(1 - u), u = (bits + 1/2) / 2^32, bits read as unsigned.

    The winner of the race has a small E, so u is accurate near 0; near 1 it is clamped below 1.
    """
    u = (bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_()
