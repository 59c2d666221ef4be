"""Arguments of ``decode_attention`` for rows of several tokens, shared by its tests and those of the kernel for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import paged_attention
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import assert_close, assert_same_cache, make_cos_sin, make_paged_inputs, make_random

CACHES = (7, 8)
ROWS = [(4, 70), (4, 4), (1, 33), (3, 66), (2, 0), (4, 131), (1, 1), (4, 64)]
"""(tokens, context): whole rows, shorter ones, a zombie, tokens on both sides of a tile's edge."""


def make(
    rows: Sequence[tuple[int, int]],
    device: str,
    *,
    width: int = 4,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    rotary: int | None = None,
    norms: bool = True,
    dtype: torch.dtype = torch.float16,
    window: int = 0,
    soft_cap: float = 0.0,
    pad_rows: int = 1,
    chunk: int = 0,
    sinks: bool = False,
    slopes: bool = False,
    shares: bool = False,
    **changes: Any,
) -> list[Any]:
    """Caches hold NaN at the rows' own tokens, which the op is to write unless it ``shares``; ``width`` tokens a row are there,
    padding included."""
    longest = max((context for _, context in rows), default=0)
    tokens = sum(count for count, _ in rows)
    numbers = {"block_size": 8, "heads_first": True, "bound": max(200, longest), "pad_rows": pad_rows}
    inputs = make_paged_inputs(
        rows, num_decode_rows=0, heads=heads, size=size, pad_tokens=width * (len(rows) + pad_rows) - tokens,
        **{**numbers, **changes}, dtype=dtype, device=device,
    )  # fmt: skip
    block_size, kv_slots, positions = inputs.k_cache.shape[1], [], []
    for (count, context), slot in zip(rows, inputs.row_slots.tolist(), strict=False):
        for position in range(context - count, context) if context else [-1] * count:
            block = int(inputs.block_tables[slot, max(position, 0) // block_size])
            kv_slots.append(block * block_size + position % block_size if context else -1)
            positions.append(max(position, 0))
            if context and not shares:
                for cache in (inputs.k_cache, inputs.v_cache):
                    cache[block, position % block_size] = float("nan")
    num_tokens = len(inputs.q)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    projected = (heads[0] + (0 if shares else 2 * heads[1])) * size
    qkv = make_random(num_tokens, projected, dtype=dtype, device=device, seed=7)
    q_norm, k_norm = (make_random(size, dtype=dtype, device=device, seed=seed) if norms else None for seed in (8, 9))
    rest = num_tokens - len(positions)
    by_head = [make_random(heads[0], dtype=torch.float32, device=device, seed=seed) for seed in (11, 12)]
    return [
        qkv, torch.tensor([*positions, *[0] * rest], **ints), make_cos_sin(max(256, longest), rotary or size, device),
        q_norm, k_norm, 1e-6, torch.tensor([*kv_slots, *[-1] * rest], **ints), inputs.k_cache, inputs.v_cache, heads[0],
        inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens,
        torch.zeros(num_tokens, heads[1], **ints), size**-0.5, window, soft_cap, inputs.max_seq_len_bound, chunk,
        by_head[0] if sinks else None, by_head[1].abs() / 4 if slopes else None, width, shares,
    ]  # fmt: skip


def check(arguments: list[Any]) -> torch.Tensor:
    """The kernels give what the reference gives, in memory that held NaN, write the caches alike and leave all else alone."""
    cpu = [a.cpu().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = decode_attention.reference(*cpu)
    with patch.object(torch, "empty", lambda size, **kind: torch.full(size, float("nan"), **kind)):
        actual: torch.Tensor = decode_attention.implementation("cuda")(*arguments)
    rounded = arguments[7].dtype is torch.float8_e4m3fn and not arguments[23]
    if rounded:  # keys are used as they are stored, perhaps rounded the other way
        q = rope_kv_write.reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in cpu[:10]))
        stored = [cache.cpu() for cache in arguments[7:9]]
        expected = paged_attention.reference(
            q, *stored, *cpu[10:18], 0, cpu[22], cpu[18], None, *cpu[19:22], False, cpu[22]
        )
    assert_close(actual, expected.to(actual.device))
    for index, (old, new) in enumerate(zip(before, arguments, strict=True)):
        if index in CACHES:
            assert_same_cache(new, cpu[index].to(new.device))
        elif isinstance(old, torch.Tensor):
            assert torch.equal(old, new), f"argument {index} has changed"
    return actual
