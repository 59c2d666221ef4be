"""``ssd_decode``: its forms against the reference, and its kernel against those of the operations it is made of, in the
interpreter bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.kernels.causal_conv.triton import causal_conv
from headway.kernels.ssd_decode import ssd_decode
from headway.kernels.ssd_decode.reference import composed
from headway.kernels.ssd_scan.triton import ssd_scan
from headway.kernels.testing import interpreter_loops, kernel_dtypes
from tests.kernels.state_cases import DECODE, PADDED, Step, rand, states, wide

S = 8
SHAPES = {"odd": (4, 6, 2, 5, 4, 4, True), "blocks": (3, 37, 3, 130, 3, 5, False), "alone": (2, 16, 1, 16, 2, 3, True)}
"""Heads, P, groups, N, taps, places of the window, and whether there is a bias."""
STEPS = {
    "decode": DECODE,
    "padded": PADDED,
    "young": Step([(1, 1, 3), (1, 2, 0), (1, 0, 5), (1, 3, 2)], zombies=(0,), pad=2, spare=1),
}
"""With tokens behind the rows, as in a graph, and at positions from which windows reach back to the beginning."""


def case(step: Step, shape: str, dtype: torch.dtype, state_dtype: torch.dtype) -> list[Any]:
    h, p, g, n, taps, places, bias = SHAPES[shape]
    t, c = step.tokens, h * p + 2 * g * n
    x, ring, state = wide(t, c, dtype), states(places, c, dtype=dtype), states(h, p, n, dtype=state_dtype)
    for slot in {*range(S)} - {*step.written}:
        ring[slot], state[slot] = float("nan"), float("nan")
    for i, slot in enumerate(step.slots):
        position = int(step.args[2][i]) - 1
        if position == 0:
            state[slot] = float("nan")  # what a slot held before its row began means nothing
        if position >= 0:
            for place in {*range(places)} - {(position - back) % places for back in range(1, min(taps, position + 1))}:
                ring[slot, place] = float("nan")
    weights = rand(c, taps, dtype=dtype), rand(c, dtype=dtype) if bias else None
    return [x, *weights, ring, wide(t, h, dtype), rand(h), -rand(h).abs(), rand(h), 0.02, 1.5, state, *step.args]


def run(form: Callable[..., torch.Tensor], args: list[Any], device: str) -> tuple[torch.Tensor, ...]:
    """(what it gives, windows, states); the states stay parts of what lies in each slot."""
    given = [each.to(device) if isinstance(each, torch.Tensor) else each for each in args]
    for at in (3, 10):
        old = args[at]
        around = torch.full((S, old[0].numel() + 7), float("nan"), dtype=old.dtype, device=device)
        given[at] = around[:, 4 : old[0].numel() + 4].unflatten(1, old.shape[1:]).copy_(old)
    return form(*given).cpu(), given[3].cpu(), given[10].cpu()


def both(*args: Any) -> torch.Tensor:
    """The kernels of the two operations."""
    with interpreter_loops():
        return composed(causal_conv, ssd_scan, args[0], args[1:4], args[4:11], args[11:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_forms_equal_the_reference(step: str, shape: str, device: str) -> None:
    chosen = STEPS[step]
    args = case(chosen, shape, torch.float32, torch.float32)
    wanted = run(ssd_decode.reference, args, "cpu")
    for form, at in (("cpu", "cpu"), ("cuda", device)):
        y, ring, state = run(ssd_decode.implementation(form), args, at)
        torch.testing.assert_close(y[chosen.live], wanted[0][chosen.live], atol=2e-5, rtol=2e-5)
        assert not y[~chosen.live].any(), "zeros where no row is live"
        torch.testing.assert_close(ring, wanted[1], atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(state, wanted[2], atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", kernel_dtypes())
def test_one_launch_gives_the_bits_of_two(dtype: torch.dtype, shape: str, device: str) -> None:
    args = case(PADDED, shape, dtype, dtype)
    near = 1e-5 if dtype is torch.float32 else 2e-2
    exact = 0.0 if device == "cpu" else near  # a card may sum in another order
    for found, wanted in zip(
        run(ssd_decode.implementation("cuda"), args, device), run(both, args, device), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=exact, rtol=exact, equal_nan=True)


def test_reference_reads_nothing_on_the_host() -> None:
    args = [
        each.to("meta") if isinstance(each, torch.Tensor) else each
        for each in case(DECODE, "odd", torch.float32, torch.float32)
    ]
    assert ssd_decode.reference(*args).shape == ssd_decode(*args).shape
