"""``rms_norm`` and its adding forms: the reference against the formula in f64, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.rms_norm import add_parts_rms_norm, add_rms_norm, norm_add, rms_norm
from headway.kernels.rms_norm.triton import MANY_ROWS
from headway.kernels.testing import assert_close, kernel_dtypes, make_random

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 16), (3, 20), (5, 80), (2, 1030)]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_follows_the_formula(dtype: torch.dtype) -> None:
    x, weight = make_random(4, 24, dtype=dtype, device="cpu"), make_random(24, dtype=dtype, device="cpu", seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(rms_norm.reference(x, weight, EPS), expected.to(dtype))


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = make_random(*shape, dtype=dtype, device=device)
    weight = make_random(shape[1], dtype=dtype, device=device, seed=1)
    before = x.clone()
    assert_close(rms_norm.implementation("cuda")(x, weight, EPS), rms_norm.reference(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", SHAPES)
def test_add_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = make_random(*shape, dtype=dtype, device=device)
    weight = make_random(shape[1], dtype=dtype, device=device, seed=1)
    residual = make_random(*shape, dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = add_rms_norm.reference(x, expected_residual, weight, EPS)
    before = x.clone()
    assert_close(add_rms_norm.implementation("cuda")(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_summed_first(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Into the residual's dtype; the parts stay."""
    parts = make_random(3, *shape, dtype=torch.float32, device=device)
    weight = make_random(shape[1], dtype=dtype, device=device, seed=1)
    residual = make_random(*shape, dtype=dtype, device=device, seed=2)
    expected_residual, before = residual.clone(), parts.clone()
    expected = add_rms_norm.reference((parts[0] + parts[1] + parts[2]).to(dtype), expected_residual, weight, EPS)
    assert_close(add_parts_rms_norm.implementation("cuda")(parts, residual, weight, EPS), expected)
    assert_close(residual, expected_residual)
    assert torch.equal(parts, before)
    assert_close(add_parts_rms_norm.reference(parts, residual.zero_(), weight, EPS),
                 rms_norm.reference(parts.sum(0).to(dtype), weight, EPS))  # fmt: skip


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("before", [True, False])
def test_norms_on_both_sides_of_the_sum(before: bool, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """The product's norm, the sum, and the next norm if there is one; weights may be f32."""
    x = make_random(*shape, dtype=dtype, device=device) * 3
    after, weight = (make_random(shape[1], dtype=torch.float32, device=device, seed=seed) for seed in (1, 3))
    residual = make_random(*shape, dtype=dtype, device=device, seed=2)
    native, expected_residual, kept = residual.clone(), residual.clone(), x.clone()
    expected_residual += rms_norm.reference(x, after, EPS)
    last = weight if before else None
    expected = rms_norm.reference(expected_residual, weight, EPS) if before else x[:0]
    assert_close(norm_add.implementation("cuda")(x, after, residual, last, EPS), expected)
    assert_close(
        norm_add.implementation("cpu")(
            x.cpu(), after.cpu(), native := native.cpu(), None if last is None else last.cpu(), EPS
        ),
        expected.cpu(),
    )
    assert_close(residual, expected_residual)
    assert_close(native, expected_residual.cpu())
    assert torch.equal(x, kept)
    parts, summed, other = (
        make_random(3, *shape, dtype=torch.float32, device=device),
        residual.clone(),
        residual.clone(),
    )
    expected = norm_add.reference((parts[0] + parts[1] + parts[2]).to(dtype), after, summed, last, EPS)
    assert_close(norm_add.implementation("cuda")(parts, after, other, last, EPS), expected)
    assert_close(other, summed)
    far = [None if each is None else each.to("meta") for each in (x, after, residual, last)]
    assert norm_add(*far, EPS).shape == expected.shape


@pytest.mark.parametrize("dtype", kernel_dtypes())
def test_a_factor_of_what_is_added(dtype: torch.dtype, device: str) -> None:
    """Rounded on its own before the sum, as a multiplication that is a kernel rounds it."""
    x, first = (make_random(5, 63, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    after, weight = (make_random(63, dtype=dtype, device=device, seed=seed) for seed in (1, 3))
    parts = make_random(3, 5, 63, dtype=torch.float32, device=device, seed=4)
    products = {
        add_rms_norm: (x, (x,)), norm_add: (rms_norm.reference(x, after, EPS), (x, after)),
        add_parts_rms_norm: ((parts[0] + parts[1] + parts[2]).to(dtype), (parts,)),
    }  # fmt: skip
    for op, (product, given) in products.items():
        wanted = first + (product * 0.22)
        places = (
            [op.implementation("cuda"), op.reference]
            if op is add_parts_rms_norm
            else [op.implementation("cuda"), op.reference, op.implementation("cpu")]
        )
        for run in places:
            if run is not places[0] and device != "cpu":
                continue
            (before, *more), residual = given, first.clone()
            y = run(before, *more, residual, weight, EPS, 0.22)
            assert_close(residual, wanted)
            assert_close(y, rms_norm.reference(residual, weight, EPS))


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("ends", [True, False])
def test_a_scale_of_the_sum(ends: bool, dtype: torch.dtype, device: str) -> None:
    """The sum is rounded first; the norm is of what the residual holds then."""
    x, first = (make_random(5, 63, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    after, weight = (make_random(63, dtype=dtype, device=device, seed=seed) for seed in (1, 3))
    scale, last = torch.full((1,), 0.37, dtype=dtype, device=device), None if ends else weight
    wanted = (first + rms_norm.reference(x, after, EPS)) * scale
    places = [norm_add.implementation("cuda"), norm_add.reference]
    for run in [*places, norm_add.implementation("cpu")] if device == "cpu" else places[:1]:
        residual = first.clone()
        y = run(x, after, residual, last, EPS, 1.0, scale)
        assert_close(residual, wanted)
        assert_close(y, x[:0] if ends else rms_norm.reference(residual, weight, EPS))
    meta = [None if each is None else each.to("meta") for each in (x, after, first, last)]
    assert norm_add(*meta, EPS, 1.0, scale.to("meta")).shape == y.shape


def test_many_rows_share_programs(device: str) -> None:
    x, weight = make_random(MANY_ROWS + 3, 20, dtype=torch.float32, device=device), torch.ones(20, device=device)
    assert_close(rms_norm.implementation("cuda")(x, weight, EPS), rms_norm.reference(x, weight, EPS))


def test_rows_may_be_strided_and_absent(device: str) -> None:
    wide, weight = make_random(3, 40, dtype=torch.float32, device=device), torch.ones(16, device=device)
    kernel = rms_norm.implementation("cuda")
    assert_close(kernel(wide[:, 8:24], weight, EPS), rms_norm.reference(wide[:, 8:24], weight, EPS))
    assert kernel(wide[:0, :16], weight, EPS).shape == (0, 16)


def test_meta_gives_shapes() -> None:
    x = torch.empty(3, 8, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(8, device="meta")
    parts = torch.empty(2, 3, 8, device="meta")
    adding = (add_rms_norm(x, torch.empty_like(x), weight, EPS), add_parts_rms_norm(parts, x, weight, EPS))
    for y in (rms_norm(x, weight, EPS), *adding):
        assert y.shape == x.shape and y.dtype == x.dtype
