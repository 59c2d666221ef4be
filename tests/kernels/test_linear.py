"""``PackedLinear`` and ``linear_packed`` against ``F.linear``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headway.kernels import linear
from headway.kernels.cpu import ops
from headway.kernels.linear import PackedLinear, linear_packed
from headway.kernels.testing import assert_close, make_random

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
needs_native = pytest.mark.skipif(not ops.available(), reason="no C compiler here")


def make_layer(outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = (make_random(outputs, inputs, dtype=torch.float32, device="cpu", seed=1) / inputs**0.5).to(dtype)
    return weight, make_random(outputs, dtype=dtype, device="cpu", seed=2) if bias else None


@BOTH
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 64), (33, 1030), (64, 2600), (7, 13), (100, 576)])
def test_packed_linear(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    weight, offset = make_layer(outputs, inputs, dtype, bias)
    layer = PackedLinear(weight, offset)
    for rows in (0, 1, 5, 12, 13, 40, 200, 400):
        x = make_random(rows, inputs, dtype=dtype, device="cpu")
        assert_close(layer(x), F.linear(x, weight, offset))
    x = make_random(2, 3, inputs, dtype=dtype, device="cpu")
    assert_close(layer(x), F.linear(x, weight, offset))
    assert_close(layer(x.transpose(0, 1)), F.linear(x.transpose(0, 1), weight, offset))
    assert torch.equal(layer.weight(), weight)


@needs_native
@BOTH
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(dtype: torch.dtype) -> None:
    """The exact sums are zero: what comes out is the error of rounding, which tells one order of sums from any other."""
    half, x = make_layer(960, 1100, dtype, False)[0], make_random(300, 1100, dtype=dtype, device="cpu")
    layer, x = PackedLinear(torch.cat((half, half), 1)), torch.cat((x, -x), 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = layer(x)
        assert whole.count_nonzero() > whole.numel() / 2
        torch.set_num_threads(2)
        for low, high in ((0, 300), (0, 1), (1, 3), (3, 8), (17, 33), (100, 299)):
            assert torch.equal(layer(x[low:high]), whole[low:high])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (33, 1030), (100, 576)])
def test_weights_that_bfloat16_holds_give_the_same_bits_from_half_the_bytes(outputs: int, inputs: int) -> None:
    weight, bias = make_layer(outputs, inputs, torch.float32, True)
    weight = weight.bfloat16().float()
    layer = PackedLinear(weight, bias)
    assert layer.packed is not None and layer.packed.dtype is torch.bfloat16
    assert torch.equal(layer.weight(), weight) and layer.weight().dtype is torch.float32
    for rows in (0, 1, 5, 12, 13, 40, 200, 400):
        x = make_random(rows, inputs, dtype=torch.float32, device="cpu")
        wide = ops.linear_packed(x, ops.pack_weight(weight), bias, outputs, True)
        assert torch.equal(ops.linear_packed(x, layer.packed, bias, outputs, True), wide)
        assert_close(layer(x), F.linear(x, weight, bias))
    assert_close(linear_packed.reference(x, layer.packed, bias, outputs), layer(x))


@needs_native
@pytest.mark.parametrize("outputs", [1, 1023, 1024, 1025, 2500])
def test_one_weight_that_bfloat16_lacks_keeps_them_all_in_float32(outputs: int) -> None:
    for row in {0, outputs // 2, outputs - 1}:
        weight = torch.ones(outputs, 8)
        assert linear.fits_bfloat16(weight)
        weight[row, 5] = 1 + 2**-8
        packed = PackedLinear(weight).packed
        assert packed is not None and packed.dtype is torch.float32


@needs_native
def test_panels_of_bfloat16_need_pairs_of_inputs() -> None:
    weight = torch.ones(4, 7)
    layer = PackedLinear(weight)
    assert layer.packed is not None and layer.packed.dtype is torch.float32
    assert torch.equal(layer(torch.ones(3, 7)), torch.full((3, 4), 7.0))


@needs_native
@BOTH
def test_the_operation_its_reference_and_meta_agree(dtype: torch.dtype) -> None:
    weight, bias = make_layer(70, 48, dtype, True)
    layer, x = PackedLinear(weight, bias), make_random(3, 48, dtype=dtype, device="cpu")
    assert layer.packed is not None
    arguments = (x, layer.packed, bias, 70)
    assert torch.equal(linear_packed(*arguments), layer(x))
    assert_close(linear_packed.reference(*arguments), layer(x))
    on_meta = linear_packed(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert on_meta.shape == (3, 70) and on_meta.dtype is dtype and on_meta.is_meta


@needs_native
def test_a_subclass_goes_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device's tensors must be seen by it; plain ones take the short way."""

    class Simulated(torch.Tensor):
        pass

    seen: list[type] = []
    real = linear.linear_packed

    def spy(x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(type(x))
        result: torch.Tensor = real(x, *rest)
        return result

    monkeypatch.setattr(linear, "linear_packed", spy)
    weight, _ = make_layer(8, 16, torch.float32, False)
    layer, x = PackedLinear(weight), torch.ones(2, 16)
    assert torch.equal(layer(x.as_subclass(Simulated)), layer(x))
    assert seen == [Simulated]


def test_weights_that_cannot_be_packed_serve_as_they_are() -> None:
    odd, half = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.float16)
    for weight in (odd, half, torch.ones(4, 8, device="meta")):
        layer = PackedLinear(weight)
        assert layer.packed is None and layer.weight() is weight
        assert layer(torch.ones(2, weight.shape[1], dtype=weight.dtype, device=weight.device)).shape == (2, 4)


@needs_native
def test_the_original_weight_is_not_kept() -> None:
    weight, _ = make_layer(64, 32, torch.float32, False)
    layer = PackedLinear(weight)
    held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert [tensor.numel() for tensor in held] == [64 * 32]
    assert layer.packed is not None and layer.packed.data_ptr() != weight.data_ptr()
