"""``place_rows``: the kernel and the reference against the definition."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.place_rows import place_rows
from headway.kernels.testing import assert_close, kernel_dtypes, make_random


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("size", [1, 63, 1030])
def test_rows_are_placed(size: int, add: bool, dtype: torch.dtype, device: str) -> None:
    x = make_random(9, size, dtype=dtype, device=device, seed=1)
    features = make_random(5, 2 * size + 3, dtype=dtype, device=device, seed=2)
    rows = torch.tensor([-1, 0, 4, 5, 2, 2, -7, 2**30, 1], dtype=torch.int32, device=device)
    expected = x.clone()
    for token, row in enumerate(rows.tolist()):
        if 0 <= row < 5:
            own = features[row, size : 2 * size]
            expected[token] = expected[token] + own if add else own
    for run in (place_rows.reference, place_rows.implementation("cuda")):
        found = x.clone()
        run(found, features, rows, size, add)
        assert_close(found, expected)
