"""The meaning of ``quant_linear`` and ``quant_rows``; shapes in the package docstring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headway.kernels.quant_linear.formats import (
    BLOCK,
    BLOCK_TYPES,
    DIGIT,
    NONLINEAR,
    PLANE_ROW,
    SUPER,
    WIDTH,
    BlockType,
    aligned,
    packed_bytes,
)


def quant_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    types: Sequence[int],
    outputs: Sequence[int],
    exact: bool = False,
) -> torch.Tensor:
    weight = dequantized(packed, types, outputs, x.shape[-1])  # [N, K]
    y = F.linear(x.float() if exact else rounded(x), weight, None if bias is None else bias.float())
    return y.to(x.dtype)


def quant_rows(
    ids: torch.Tensor, packed: torch.Tensor, kind: int, outputs: int, inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    table = dequantized(packed, (kind,), (outputs,), inputs)
    known = (ids >= 0) & (ids < outputs)
    rows = table[torch.where(known, ids, 0).long()]
    return torch.where(known[:, None], rows, 0.0).to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as the kernels see it, float32: 8 bits and a scale for every 32, 16 bits where that is coarse for the row."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))  # [..., K / 32, 32]
    largest = blocks.abs().amax(-1, keepdim=True)
    usable = (largest > 1e-30) & (largest < torch.inf)  # smaller ones have no reciprocal
    scaled = torch.where(usable, blocks * (127.0 / largest), 0.0)
    high = scaled.round()
    fine = largest.square() > largest.square().mean(
        -2, keepdim=True
    )  # its steps are longer than the row's root mean square
    low = torch.where(fine, ((scaled - high) * DIGIT).round() / DIGIT, 0.0)
    return ((high + low) * (largest * (1.0 / 127))).flatten(-2)  # what is not finite makes its block NaN


def dequantized(packed: torch.Tensor, types: Sequence[int], outputs: Sequence[int], inputs: int) -> torch.Tensor:
    """float32 [N, inputs]."""
    parts, start = [], 0
    for kind, rows in zip(types, outputs, strict=True):
        size = packed_bytes(kind, rows, inputs)
        parts.append(_part(packed[start : start + size], BLOCK_TYPES[kind], rows, inputs))
        start += aligned(size)
    return torch.cat(parts)


def _part(packed: torch.Tensor, kind: BlockType, outputs: int, inputs: int) -> torch.Tensor:
    panels = -(-outputs // WIDTH)
    head = None
    if kind.in_supers:
        supers = packed.view(panels, inputs // SUPER, -1)
        head = supers[..., : kind.head_bytes].contiguous().view(torch.float16).float()  # [P, S, 16 or 32]
        packed = supers[..., kind.head_bytes :]
    blocks = packed.reshape(panels, inputs // BLOCK, kind.block_bytes)
    scales, minima = _scales(blocks[..., : kind.scale_bytes].contiguous(), head, kind)  # [P, B, groups, 16] each
    values = _values(blocks[..., kind.scale_bytes :], kind)  # [P, B, 16, 32]
    groups = values.unflatten(-1, (kind.groups, -1))  # [P, B, 16, groups, 32 / groups]
    weight = groups * scales.transpose(2, 3)[..., None]
    if minima is not None:
        weight = weight + minima.transpose(2, 3)[..., None]
    return weight.flatten(3).transpose(1, 2).reshape(panels * WIDTH, inputs)[:outputs]


def _scales(
    stored: torch.Tensor, head: torch.Tensor | None, kind: BlockType
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """stored uint8 [P, B, bytes], head float32 [P, S, 16 (d) or 32 (d, dmin)] -> scales and minima."""
    if head is None:
        halves = stored.view(torch.float16).float().unflatten(-1, (-1, 1, WIDTH))  # [P, B, 1 or 2, 1, 16]
        return halves[:, :, 0], halves[:, :, 1] if kind.minima else None
    whole = head.repeat_interleave(SUPER // BLOCK, dim=1).unflatten(-1, (-1, 1, WIDTH))  # [P, B, 1 or 2, 1, 16]
    small = stored.view(torch.int8).unflatten(-1, (-1, WIDTH))
    if kind.minima == "nibble":
        bytes_ = small.view(torch.uint8)
        return whole[:, :, 0] * (bytes_ & 15), -(whole[:, :, 1] * (bytes_ >> 4))
    scales = whole[:, :, 0] * small[:, :, : kind.groups]
    return scales, -(whole[:, :, 1] * small[:, :, kind.groups :]) if kind.minima else None


def _values(planes: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """planes uint8 [P, B, bits * 64] -> float32 [P, B, 16, 32], what the integers stand for."""
    rows = planes.unflatten(-1, (-1, PLANE_ROW))  # [P, B, bits, 64]
    if kind.bits == 8:
        steps = rows.contiguous().view(torch.int8).float()
        return _in_order(steps)
    low = 4 if kind.bits >= 4 else 2
    stored = _fields(rows[:, :, :low], low)
    if kind.bits > low:
        stored = stored | _fields(rows[:, :, low:], kind.bits - low) << low
    if kind.table:
        return _in_order(torch.tensor(NONLINEAR, dtype=torch.float32, device=planes.device)[stored.long()])
    return _in_order(stored.float() - kind.offset)


def _fields(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """rows uint8 [P, B, bits, 64] -> [P, B, 8 steps, 64]. Nibbles hold steps s and s + 4, smaller fields neighbours."""
    shifts = range(0, 8, bits)
    fields = torch.stack([rows >> shift & (2**bits - 1) for shift in shifts], dim=2 if bits == 4 else 3)
    return fields.flatten(2, 3)


def _in_order(steps: torch.Tensor) -> torch.Tensor:
    """[P, B, 8, 16 outputs x 4 inputs] -> [P, B, 16, 32]."""
    return steps.unflatten(-1, (WIDTH, 4)).transpose(2, 3).flatten(3)
