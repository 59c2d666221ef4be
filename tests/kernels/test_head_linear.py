"""``head_linear``: the kernel against the reference, on tokens of short rows, of long ones and of none."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.head_linear import head_linear
from headway.kernels.testing import assert_close, interpreter_loops, kernel_dtypes, make_random
from tests.kernels.latent_cases import SHORT, SIZES, Sizes, kernel, on, scene


@pytest.mark.parametrize(
    ("sizes", "most"), [(SIZES[0], 1), (SIZES[1], SHORT), (SIZES[2], SHORT), (SIZES[0], 2**31 - 1)]
)
def test_kernel_equals_reference(sizes: Sizes, most: int, device: str) -> None:
    for dtype in kernel_dtypes():
        made = scene(sizes, device, dtype)
        x = made.q[..., : sizes.nope]
        x[-1] = float("nan")  # of no row
        w = make_random(sizes.heads, sizes.nope, sizes.rank, dtype=dtype, device=device, seed=5) / 4
        out = make_random(len(x), sizes.heads, sizes.rank, dtype=dtype, device=device, seed=6)
        expected, found = (
            on(implementation, x, w, out, made.query_start, most)[2]
            for implementation in (head_linear.reference, kernel(head_linear))
        )
        assert_close(found, expected)
        assert not expected[-5:].any(), "tokens of no row are zeros"


def test_any_strides(device: str) -> None:
    """Weights with their inputs side by side, factors and outputs with heads first."""
    made, sizes = scene(SIZES[0], device), SIZES[0]
    tokens = len(made.q)
    x = make_random(sizes.heads, tokens, sizes.rank, dtype=torch.float32, device=device).transpose(0, 1)
    w = make_random(sizes.heads, 22, sizes.rank, dtype=torch.float32, device=device)[:, 12:].transpose(1, 2)
    results = []
    for implementation in (head_linear.reference, kernel(head_linear)):
        out = torch.empty(sizes.heads, tokens, 10, device=device).transpose(0, 1)
        with interpreter_loops():
            implementation(x, w, out, made.query_start, 2**31 - 1)
        results.append(out)
    assert_close(results[1], results[0])


def test_rows_that_nobody_has(device: str) -> None:
    """Hundreds of rows of one token, more than a program looks at together."""
    starts = torch.arange(301, dtype=torch.int32, device=device)
    x = make_random(310, 2, 16, dtype=torch.float32, device=device)
    w = make_random(2, 16, 16, dtype=torch.float32, device=device)
    out = torch.zeros(310, 2, 16, device=device)
    expected, found = (on(each, x, w, out, starts, 1)[2] for each in (head_linear.reference, kernel(head_linear)))
    assert_close(found, expected)
    assert expected[299].any() and not expected[300:].any()
