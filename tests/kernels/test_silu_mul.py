"""Activations and gates of ``silu_mul``: references against formulas in f64, kernels against references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.silu_mul import GATES, gate_mul, gelu, gelu_mul, sigmoid_mul, silu_mul
from headway.kernels.testing import assert_close, kernel_dtypes, make_random

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_follows_the_formula(dtype: torch.dtype) -> None:
    x = make_random(4, 24, dtype=dtype, device="cpu")
    gate, up = x.double().split(12, dim=1)
    assert_close(silu_mul.reference(x), (gate / (1 + (-gate).exp()) * up).to(dtype))


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", [(1, 2), (3, 40), (2, 2 * 1030), (0, 8)])
def test_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = make_random(*shape, dtype=dtype, device=device) * 4
    assert_close(silu_mul.implementation("cuda")(x), silu_mul.reference(x))


def test_large_gates_saturate(device: str) -> None:
    x = torch.tensor([[-80.0, 80.0, 2.0, 2.0]], device=device)
    assert silu_mul.implementation("cuda")(x)[0].tolist() == pytest.approx([0.0, 160.0], abs=1e-30)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_of_both_kinds(tanh: bool, dtype: torch.dtype, device: str) -> None:
    """Reference and kernel follow the formula in f64; large gates saturate."""
    x = make_random(3, 2 * 1030, dtype=dtype, device=device) * 4
    x[0, :2] = torch.tensor([-80.0, 80.0])
    gate, up = x.double().split(1030, dim=1)
    phi = (
        (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 if tanh else torch.special.ndtr(gate)
    )
    expected = gelu_mul.reference(x, tanh)
    assert_close(expected, ((gate * phi).to(dtype) * up).to(dtype))
    assert_close(gelu_mul.implementation("cuda")(x, tanh), expected)
    assert gelu_mul(x.to("meta"), tanh).shape == expected.shape


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("act", GATES)
def test_gate_and_factor_may_lie_apart(act: str, dtype: torch.dtype, device: str) -> None:
    """In tensors of their own, with rows of other strides; both are kept."""
    gate, wide = (make_random(3, size, dtype=dtype, device=device, seed=size) * 3 for size in (1030, 4 * 1030))
    up, kept = wide.view(3, 4, 1030)[:, 2], (gate.clone(), wide.clone())
    both = torch.cat([gate, up], dim=1)
    expected = silu_mul.reference(both) if act == "silu" else gelu_mul.reference(both, act == "gelu_tanh")
    assert_close(gate_mul.reference(gate, up, act), expected)
    assert_close(gate_mul.implementation("cuda")(gate, up, act), expected)
    assert torch.equal(gate, kept[0]) and torch.equal(wide, kept[1])
    assert gate_mul(gate.to("meta"), up.to("meta"), act).shape == expected.shape


def test_rows_may_be_strided(device: str) -> None:
    x = make_random(3, 64, dtype=torch.float32, device=device)[:, 16:48]
    assert_close(silu_mul.implementation("cuda")(x), silu_mul.reference(x))


def test_meta_gives_shapes() -> None:
    y = silu_mul(torch.empty(3, 8, device="meta", dtype=torch.float16))
    assert y.shape == (3, 4) and y.dtype == torch.float16


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 1030), (0, 8)])
def test_gates_of_attention(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Gates are a part of wider rows, and large ones saturate."""
    rows, size = shape
    x, wide = (make_random(rows, size + 7, dtype=dtype, device=device, seed=seed) * 4 for seed in (1, 2))
    wide[:, 5:6] *= 90
    x, gate = x[:, 3 : size + 3], wide[:, 5 : size + 5]
    found = sigmoid_mul.implementation("cuda")(x, gate)
    assert_close(found, sigmoid_mul.reference(x, gate))
    assert_close(found, (x.double() * gate.double().sigmoid()).to(dtype))
    assert sigmoid_mul(x.to("meta"), gate.to("meta")).shape == found.shape


def test_gelu_of_every_number(device: str) -> None:
    """Of 16 bits, to half a unit in the last place; infinities and what is no number, too."""
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.float16).view(64, 1024)
    found = gelu.implementation("cuda")(x)
    exact = 0.5 * x.double() * torch.special.erfc(-x.double() / 2**0.5)
    exact[x == -torch.inf] = 0.0
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * 2**-11, atol=1.01 * 2**-25, equal_nan=True)


@pytest.mark.parametrize("dtype", kernel_dtypes())
def test_gelu_equals_reference(dtype: torch.dtype, device: str) -> None:
    wide = make_random(6, 1070, dtype=dtype, device=device) * 4
    for x in (wide[:0], wide[:, 20:1050], wide.view(2, 3, 1070), wide.T):
        found = gelu.implementation("cuda")(x)
        assert_close(found, F.gelu(x))
        assert gelu(x.to("meta")).shape == found.shape
