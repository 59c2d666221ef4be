"""``cap_logits``: the reference against the formula in f64, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.cap_logits import cap_logits
from headway.kernels.testing import assert_close, kernel_dtypes, make_random


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("factor", "cap"), [(0.125, 0.0), (1.0, 30.0), (0.4, 3.0)])
@pytest.mark.parametrize(("rows", "vocab", "stride"), [(1, 7, 8), (3, 2051, 2056), (0, 8, 8), (2, 16, 16)])
def test_formula_and_kernel(
    rows: int, vocab: int, stride: int, factor: float, cap: float, dtype: torch.dtype, device: str
) -> None:
    """Large logits saturate; what lies between the rows stays."""
    held = make_random(rows, stride, dtype=dtype, device=device) * 8
    held[:1, :4] = torch.tensor([float("inf"), -1000.0, 0.0, 1e-3])
    expected = held[:, :vocab].double() * factor
    if cap:
        expected = cap * torch.tanh(expected / cap)
    for implementation in (cap_logits.reference, cap_logits.implementation("cuda")):
        found = held.clone()
        implementation(found[:, :vocab], factor, cap)
        assert_close(found[:, :vocab], expected.to(dtype))
        assert torch.equal(found[:, vocab:], held[:, vocab:])
