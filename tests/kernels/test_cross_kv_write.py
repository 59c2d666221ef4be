"""``cross_kv_write``: outputs go to their places and nowhere else."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.cross_kv_write import cross_kv_write
from headway.kernels.testing import make_random
from tests.kernels.guarded import run_both


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("heads", "size"), [(2, 8), (3, 20)])
def test_outputs_go_to_their_places(heads: int, size: int) -> None:
    kv = make_random(5, 2 * heads * size, dtype=torch.float32, device="cpu")
    caches = [torch.full((4, 8, heads, size), float(value)) for value in (7, 8)]
    places = i32(9, -1, 31, 8, 99)
    expected = [cache.clone() for cache in caches]
    for row, place in ((0, 9), (2, 31), (3, 8)):
        for cache, part in zip(expected, kv[row].view(2, heads, size), strict=True):
            cache[place // 8, place % 8] = part
    for after, _ in run_both(cross_kv_write, (kv, places, *caches)):
        assert torch.equal(after[2], expected[0]) and torch.equal(after[3], expected[1])
