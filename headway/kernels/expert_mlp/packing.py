"""How weights in MXFP4 lie in memory: so that two at a time become bf16 by a shift and a mask.

A row of K weights is cut into groups of 64, two blocks of one scale each. The i-th of a group's sixteen 16-bit words holds its
weights i, i + 16, i + 32 and i + 48. A bf16 has its sign at bit 15, and with a small exponent and fraction the three other
bits of a 4-bit float at 8, 7 and 6. Shifted to the left by 0, 3 and 6 the word has the first three weights there; of the fourth
the sign and the highest bit are one and five places off, the others four.

Loads of neighbouring words meet neighbouring activations, and a whole load is of one pair of blocks.
"""

from __future__ import annotations

import torch

MOST_SCALE = 160
"""The largest whose product with a factor of 16 bits is one, too: kernels keep 2^32 of it for the sums."""


def packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of 4-bit floats, their sign at bit 3 -> uint8 [..., K / 2]."""
    a, b, c, d = codes.unflatten(-1, (-1, 4, 16)).int().unbind(-2)
    words = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | c & 7
    words |= (d & 8) << 11 | (d & 4) << 11 | (d & 3) << 10
    return torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).flatten(-3)


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """What ``packed`` packs: uint8 [..., K / 2] -> uint8 [..., K]."""
    low, high = words.unflatten(-1, (-1, 16, 2)).int().unbind(-1)
    word = low | high << 8
    signs = word >> 12, word >> 9, word >> 6, word >> 11
    values = word >> 6, word >> 3, word, (word >> 11) & 4 | (word >> 10) & 3
    parts = [sign & 8 | value & 7 for sign, value in zip(signs, values, strict=True)]
    return torch.stack(parts, dim=-2).to(torch.uint8).flatten(-3)
