"""The threshold searches of ``sample``, on keys small enough to enumerate every threshold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from headway.kernels.sample.triton_select import ABOVE_ALL, kth_key, mass_key, row_key, row_mass, safe_floor
from headway.kernels.testing import interpreter_loops
from headway.kernels.triton_math import float_of_key, order_key

SIZE, PART = 64, 8


@triton.jit
def _kth_kernel(values, out, floor, k, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(values + tl.arange(0, SIZE))
    key = kth_key(order_key(x), order_key(tl.load(floor)), order_key(tl.max(x, 0)), k)
    tl.store(out, tl.where(key == ABOVE_ALL, float("nan"), float_of_key(key)))


@triton.jit
def _mass_kernel(values, out, floor, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(values + tl.arange(0, SIZE))
    weight = tl.exp(x - tl.max(x, 0))
    key = mass_key(order_key(x), weight, order_key(tl.load(floor)), order_key(tl.max(x, 0)), tl.load(target))
    tl.store(out, tl.where(key == ABOVE_ALL, float("nan"), float_of_key(key)))


@triton.jit
def _row_kernel(values, out, floor, target, vocab, MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    top = float("-inf")
    for index in range(vocab):
        top = tl.maximum(top, tl.load(values + index))
    low = order_key(tl.load(floor))
    tl.store(out, float_of_key(row_key((values,), vocab, 1.0, top, low, tl.load(target), MASS, 4, 32)))
    tl.store(out + 1, row_mass((values,), vocab, 1.0, top, tl.load(floor), 32))


@triton.jit
def _floor_kernel(values, out, k, p, SIZE: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(values + tl.arange(0, SIZE)[:, None] * PART + tl.arange(0, PART)[None, :])
    tops = tl.max(x, 1)
    sums = tl.sum(tl.exp(x - tops[:, None]), 1)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    tl.store(out, safe_floor(tops, sums, top, total, k, tl.load(p), PART))


def _launch(kernel: Any, device: str, values: torch.Tensor, *arguments: float | int, **constants: Any) -> list[float]:
    """Real arguments go as one-element tensors: the interpreter would otherwise compute with Python floats."""
    out = torch.zeros(2, device=device)
    moved = [torch.tensor([a], device=device) if isinstance(a, float) else a for a in arguments]
    with interpreter_loops():
        kernel[(1,)](values.to(device), out, *moved, **constants)
    return [float(value) for value in out.cpu()]


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    plain = torch.randn(SIZE) * 3
    ties = (plain * 2).round() / 2
    close = torch.tensor([1.0, 1.0 + 2**-23, -1.0, -1.0 - 2**-23]).repeat(SIZE // 4)  # neighbours among the floats
    signs = torch.cat((torch.full((SIZE // 2,), -1e-40), torch.linspace(-1e30, 1e30, SIZE // 2)))
    return [plain, ties, close, signs + 0.0]


@pytest.mark.parametrize("index", range(4))
def test_kth_is_exact(index: int, device: str) -> None:
    values = _inputs()[index]
    down = values.sort(descending=True).values.tolist()
    for k in (1, 2, 3, 31, 32, 63, 64):
        assert _launch(_kth_kernel, device, values, -math.inf, k, SIZE=SIZE)[0] == down[k - 1]
        # A floor among the values: the k-th if it is not below, else the smallest value that the floor lets through.
        assert _launch(_kth_kernel, device, values, down[20], k, SIZE=SIZE)[0] == max(down[k - 1], down[20])


def _least(values: torch.Tensor, floor: float, reaches: Callable[[float], bool]) -> float:
    """The largest value whose set of values >= it ``reaches``; the smallest >= floor if none does."""
    kept = sorted({value for value in values.tolist() if value >= floor}, reverse=True)
    return next((bound for bound in kept if reaches(bound)), kept[-1])


def _weigh(values: torch.Tensor, bound: float) -> float:
    return float((values.double() - values.max().double()).exp()[values >= bound].sum())


@pytest.mark.parametrize("index", range(3))
def test_mass_is_exact(index: int, device: str) -> None:
    """Targets lie halfway between the masses of neighbouring thresholds, so that rounding cannot decide."""
    values = _inputs()[index]
    down = sorted(set(values.tolist()), reverse=True)
    for place in {0, 1, 2, len(down) // 4, len(down) // 2, len(down) - 1}:
        if place >= len(down):
            continue
        before, after = _weigh(values, down[place - 1]) if place else 0.0, _weigh(values, down[place])
        if after - before < 1e-4 * after:
            continue
        target = (before + after) / 2
        for floor in (-math.inf, down[-1], down[len(down) // 2]):
            expected = _least(values, floor, lambda bound, target=target: _weigh(values, bound) >= target)  # type: ignore[misc]
            assert _launch(_mass_kernel, device, values, floor, target, SIZE=SIZE)[0] == expected


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("index", range(3))
def test_row_searches_keep_the_same_tokens(index: int, mass: bool, device: str) -> None:
    values = _inputs()[index][:61]  # no multiple of a block
    down = sorted(set(values.tolist()), reverse=True)

    def weigh(bound: float) -> float:
        return _weigh(values, bound) if mass else float((values >= bound).sum())

    for place in {0, 1, len(down) // 4, len(down) - 1}:
        before, after = weigh(down[place - 1]) if place else 0.0, weigh(down[place])
        if after - before < 1e-4 * after:
            continue
        target = (before + after) / 2 if mass else after
        for floor in (-math.inf, down[len(down) // 2]):
            expected = _least(values, floor, lambda bound, target=target: weigh(bound) >= target)  # type: ignore[misc]
            bound, whole = _launch(_row_kernel, device, values, floor, target, len(values), MASS=mass)
            assert (values >= bound).tolist() == (values >= expected).tolist()
            assert whole == pytest.approx(_weigh(values, floor), rel=1e-5)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_the_floor_is_safe_and_near(spread: float, device: str) -> None:
    """At least k tokens, and at least the mass p, are not below it; and it is not far below the threshold."""
    torch.manual_seed(int(spread * 100))
    for offset in (0.0, 20.0, -20.0):
        values = torch.randn(SIZE * PART) * spread + offset
        down = values.sort(descending=True).values
        share = (down.double() - down[0]).exp().cumsum(0)
        for k, p in ((1, 2.0), (5, 2.0), (40, 2.0), (64, 2.0), (ABOVE_ALL.value, 0.3), (ABOVE_ALL.value, 0.9)):
            floor = _launch(_floor_kernel, device, values, k, p, SIZE=SIZE, PART=PART)[0]
            bound = float(down[k - 1] if p > 1 else down[int((share < p * share[-1]).sum())])
            assert floor <= bound
            if k <= 5 and offset == 0.0:  # the floor's steps are 1/128 of the value
                assert int((values >= floor).sum()) <= 4 * k
