"""``cross_attention``: every token sees all outputs of its slot, whatever lies behind them."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.cross_attention import cross_attention
from headway.kernels.testing import assert_close, make_random
from tests.kernels.guarded import run_both


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def caches(heads: int, size: int, blocks: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones with a null block of garbage."""
    made = [make_random(blocks, 8, heads, size, dtype=torch.float32, device="cpu", seed=seed) for seed in (1, 2)]
    for cache in made:
        cache[0] = 1e4
    return made[0], made[1]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 3, 20)])
def test_every_token_sees_all_outputs(heads: int, kv_heads: int, size: int) -> None:
    k, v = caches(kv_heads, size)
    k[4, 3:], v[4, 3:] = 1e4, float("nan")  # behind the last output of slot 1
    tables, slots, lens = i32(1, 2, 3, 0, 4, 0).view(3, 2), i32(0, 2, 2, -1, 1, 0), i32(16, 3, 3, 0, 8, 16)
    tables = i32(1, 2, 3, 0, 4, 0).view(3, 2)
    q = make_random(6, heads, size, dtype=torch.float32, device="cpu", seed=3)
    args = (
        q,
        k,
        v,
        tables,
        slots,
        torch.arange(7, dtype=torch.int32),
        lens,
        torch.zeros(6, kv_heads, dtype=torch.int32),
    )
    expected = torch.zeros_like(q)
    for token, (slot, length) in enumerate(zip(slots.tolist(), lens.tolist(), strict=True)):
        if slot < 0:
            continue
        keys, values = (cache[tables[slot].long()].flatten(0, 1)[:length] for cache in (k, v))
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[token], keys) * 0.3, -1)
        expected[token] = torch.einsum("hk,khd->hd", weights, values)
    for after, out in run_both(cross_attention, (*args, 0.3, 16)):
        assert_close(out, expected)
        assert not after[7].any(), "the scratch is zero again"
