"""``add_layer_norm`` on a CPU against torch, and GELU behind a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.add_layer_norm import add_layer_norm
from headway.kernels.cpu import ops
from headway.kernels.linear import PackedLinear
from headway.kernels.testing import assert_close, kernel_dtypes, make_random

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@BOTH
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 7), (5, 16), (4, 33), (150, 384)])
def test_residual_and_norm(rows: int, size: int, bias: bool, dtype: torch.dtype) -> None:
    x, residual = (make_random(rows, size, dtype=dtype, device="cpu", seed=seed) + 3 * seed for seed in (1, 2))
    weight = make_random(size, dtype=dtype, device="cpu", seed=3)
    shift = make_random(size, dtype=dtype, device="cpu", seed=4) if bias else None
    added = residual + x
    expected = F.layer_norm(added.double(), (size,), weight.double(), None if shift is None else shift.double(), 1e-5)
    found = add_layer_norm(x, residual, weight, shift, 1e-5)
    assert torch.equal(residual, added)
    assert_close(found, expected.to(dtype))


def test_what_is_not_native_is_torchs() -> None:
    wide = make_random(4, 20, dtype=torch.float32, device="cpu")
    x, residual = wide[:, :10], torch.zeros(4, 10)
    expected = F.layer_norm(x, (10,), torch.ones(10))
    assert_close(add_layer_norm(x, residual, torch.ones(10), None, 1e-5), expected)
    on_meta = (torch.empty(4, 10, device="meta") for _ in range(2))
    assert add_layer_norm(*on_meta, torch.empty(10, device="meta"), None, 1e-5).shape == (4, 10)


@pytest.mark.skipif(not ops.available(), reason="no C compiler here")
@BOTH
def test_gelu_behind_a_product(dtype: torch.dtype) -> None:
    """From where it is 0 to where it is x, with the digits of small results."""
    weight = torch.eye(40, 48).to(dtype)
    layer = PackedLinear(weight, torch.zeros(40, dtype=dtype))
    layer.gelu = True
    x = torch.linspace(-14, 9, 48 * 60).view(60, 48).to(dtype)
    expected = F.gelu(x[:, :40].double())
    torch.testing.assert_close(layer(x).double(), expected, atol=4e-7, rtol=1e-6 if dtype is torch.float32 else 8e-3)
    x[0, 0] = float("nan")
    assert layer(x)[0].isnan().all() and not layer(x)[1:].isnan().any()


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "size"), [(0, 16), (1, 16), (3, 20), (5, 80), (2, 1030)])
def test_kernel_equals_reference(rows: int, size: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    x, residual = (make_random(rows, size, dtype=dtype, device=device, seed=seed) + 3 * seed for seed in (1, 2))
    weight = make_random(size, dtype=dtype, device=device, seed=3)
    shift = make_random(size, dtype=dtype, device=device, seed=4) if bias else None
    theirs = residual.clone()
    expected = add_layer_norm.reference(x, theirs, weight, shift, 1e-5)
    assert_close(add_layer_norm.implementation("cuda")(x, residual, weight, shift, 1e-5), expected)
    assert torch.equal(residual, theirs)


@pytest.mark.parametrize("turned", ["x", "residual", "both"])
def test_kernel_takes_rows_that_lie_apart(turned: str, device: str) -> None:
    """As behind a convolution, whose channels come first."""
    x, residual = (make_random(12, 7, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    x = x.T if turned != "residual" else x.T.contiguous()
    residual = residual.T if turned != "x" else residual.T.contiguous()
    weight, theirs = torch.ones(12, device=device), residual.clone()
    expected = add_layer_norm.reference(x, theirs, weight, None, 1e-5)
    assert_close(add_layer_norm.implementation("cuda")(x, residual, weight, None, 1e-5), expected)
    assert torch.equal(residual, theirs)
