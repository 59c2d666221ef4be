"""``dense_rope``: what ``rope_kv_write`` does to queries and keys, in place."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.dense_rope import dense_rope
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import assert_close, make_cos_sin, make_random
from tests.kernels.guarded import run_both

CASES = [(4, 2, 8, 8, False), (3, 1, 12, 8, True), (4, 4, 16, 16, True), (6, 6, 6, 6, False)]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rotated", "norms"), CASES)
def test_both_equal_the_cached_form(heads: int, kv_heads: int, size: int, rotated: int, norms: bool) -> None:
    tokens = 7
    qkv = make_random(tokens, (heads + 2 * kv_heads) * size, dtype=torch.float32, device="cpu")
    positions = torch.tensor([0, 1, 2, 0, 9, 30, -1], dtype=torch.int32)
    table = make_cos_sin(16, rotated, "cpu")
    weights = [make_random(size, dtype=torch.float32, device="cpu", seed=i) for i in (1, 2)] if norms else [None, None]
    k, v = (torch.zeros(tokens, 1, kv_heads, size) for _ in range(2))
    slots = torch.arange(tokens, dtype=torch.int32)
    q = rope_kv_write.reference(qkv, positions, table, *weights, 1e-5, slots, k, v, heads)
    expected = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    for after, _ in run_both(dense_rope, (qkv, positions, table, *weights, 1e-5, heads, kv_heads)):
        assert_close(after[0], expected)
