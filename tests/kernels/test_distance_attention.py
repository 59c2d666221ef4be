"""``distance_attention``: causal attention over blocks, with a bias by distance."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.distance_attention import distance_attention
from headway.kernels.testing import assert_close, make_random
from tests.kernels.guarded import run_both
from tests.kernels.test_cross_attention import caches, i32


@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 12)])
def test_scores_have_a_bias_by_distance(heads: int, size: int) -> None:
    k, v = caches(heads, size)
    tables = i32(1, 2, 3, 4, 5, 6, 7, 8).view(2, 4)
    starts, slots, lens = i32(0, 1, 6, 6), i32(1, 0, -1), i32(30, 19, 0)
    q = make_random(8, heads, size, dtype=torch.float32, device="cpu", seed=3)
    bias = make_random(heads, 9, dtype=torch.float32, device="cpu", seed=4)
    expected = torch.zeros_like(q)
    for row, (first, end) in enumerate(((0, 1), (1, 6))):
        for token in range(first, end):
            place = int(lens[row]) - (end - token)
            keys, values = (cache[tables[int(slots[row])].long()].flatten(0, 1)[: place + 1] for cache in (k, v))
            distance = (place - torch.arange(place + 1)).clamp(max=8)
            scores = torch.einsum("hd,khd->hk", q[token], keys) * 0.5 + bias[:, distance]
            expected[token] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), values)
    for _, out in run_both(distance_attention, (q, k, v, tables, slots, starts, lens, bias, 0.5, 32)):
        assert_close(out[:6], expected[:6])
        assert not out[6:].any(), "what belongs to no row is zero"
