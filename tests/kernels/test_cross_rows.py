"""``cross_rows``: each token finds its row, its slot and how much it may read."""

from __future__ import annotations

import torch

from headway.kernels.cross_rows import cross_rows
from tests.kernels.guarded import run_both


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_each_token_finds_its_row() -> None:
    starts, slots, lens = i32(0, 1, 4, 4, 9, 9), i32(2, 0, 5, 1, -1), i32(7, 3, 1, 5, 0)
    out = torch.full((12,), 99, dtype=torch.int32)
    args = (starts, slots, lens, i32(11, 12, 13), out, out.clone())
    wanted_slots = i32(2, 0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1)
    wanted = i32(13, 11, 11, 11, 12, 12, 12, 12, 12, 0, 0, 0)
    for after, _ in run_both(cross_rows, args):
        assert torch.equal(after[4], wanted_slots) and torch.equal(after[5], wanted)
    silent = (starts, slots, i32(7, 0, 1, 5, 0), i32(11, 12, 13), out, out.clone())  # a zombie row reads nothing
    for after, _ in run_both(cross_rows, silent):
        assert after[4][1:4].tolist() == [-1] * 3 and after[5][1:4].tolist() == [0] * 3
