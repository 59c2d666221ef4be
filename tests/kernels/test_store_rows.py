"""``store_rows``: the kernel and the reference against the definition."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.store_rows import store_rows
from headway.kernels.testing import make_random


@pytest.mark.parametrize("places", [[3, 0, 6], [-1, 2, 7], [6, -1, 99], [], [-1, -1]])
def test_rows_are_stored(places: list[int], device: str) -> None:
    table = make_random(7, 33, dtype=torch.float32, device=device, seed=1)
    rows = make_random(len(places), 33, dtype=torch.float32, device=device, seed=2)
    expected = table.clone()
    for row, place in enumerate(places):
        if 0 <= place < 7:
            expected[place] = rows[row]
    for run in (store_rows.reference, store_rows.implementation("cuda")):
        found = table.clone()
        run(found, torch.tensor(places, dtype=torch.int32, device=device), rows)
        assert torch.equal(found, expected)
