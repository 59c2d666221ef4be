"""``delta_token``: its kernel gives the bits of the three kernels that it stands in for, and what their references give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.causal_conv import causal_conv
from headway.kernels.delta_token import delta_token, triton
from headway.kernels.gated_delta import gated_delta
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.kernels.testing import interpreter_loops
from tests.kernels.state_cases import DECODE, PADDED, S, Step, rand, states, wide

SHAPES = {"more values": (2, 4, 9, 7, 4, 4), "wide values": (1, 3, 5, 18, 3, 5), "one each": (3, 3, 16, 16, 2, 2)}
"""HK, H, K, V, taps, places of a window."""
PARTS = causal_conv, gated_delta, gated_rms_norm
YOUNG = Step([(1, 0, 6), (1, 1, 2), (1, 2, 3)], pad=0)
"""Rows whose windows begin before their first token."""


def arguments(step: Step, shape: str, dtype: torch.dtype, by_channel: bool) -> list[Any]:
    """What slots without a live row have, and what rows at position 0 must not read, is not a number."""
    hk, h, k, v, taps, places = SHAPES[shape]
    t, channels = step.tokens, 2 * hk * k + h * v
    a, bias = (rand(t, h, k, dtype=dtype), rand(h, k)) if by_channel else (wide(t, h, dtype), rand(h))
    ring, state = states(places, channels, dtype=dtype), states(h, k, v)
    starts = (step.args[2] - step.args[0].diff())[: len(step.slots)].tolist()
    for slot in range(S):
        start = starts[step.slots.index(slot)] if slot in step.written else 0
        seen = [position % places for position in range(max(0, start - taps + 1), start)]
        ring[slot, [place for place in range(places) if place not in seen]] = float("nan")
        if not start:
            state[slot] = float("nan")
    return [
        wide(t, channels, dtype), rand(channels, taps, dtype=dtype), ring, a, rand(h) - 2, bias, wide(t, h, dtype), 2.0,
        k**-0.5, state, wide(t, h * v, dtype) * 2, rand(v, dtype=dtype), 1e-5, by_channel, *step.args,
    ]  # fmt: skip


def three(parts: tuple[Callable[..., torch.Tensor], ...], args: list[Any]) -> torch.Tensor:
    x, weight, ring, *rule, gate, norm, eps, sigmoid = args[:14]
    convolve, update, normalise = parts
    _, h, k, v = rule[-1].shape
    keys = (x.shape[1] - h * v) // 2
    q, key, value = convolve(x, weight, None, ring, *args[14:], True).split((keys, keys, h * v), 1)
    q, key, value = q.unflatten(1, (-1, k)), key.unflatten(1, (-1, k)), value.unflatten(1, (-1, v))
    return normalise(update(q, key, value, *rule, *args[14:]).flatten(1), gate, norm, eps, v, False, sigmoid)


def results(run: Callable[[list[Any]], torch.Tensor], args: list[Any], device: str) -> list[torch.Tensor]:
    """Outputs, windows, states; outputs are not numbers before they are written."""

    def empty(size: Any, **kind: Any) -> torch.Tensor:
        return torch.full(size, float("nan"), **kind)

    mine = [each.clone().to(device) if isinstance(each, torch.Tensor) else each for each in args]
    for at in (2, 9):  # a part of what lies in each slot, as in the pool
        whole = torch.zeros(S, mine[at][0].numel() + 7, dtype=mine[at].dtype, device=device)
        mine[at] = whole[:, 4 : mine[at][0].numel() + 4].unflatten(1, mine[at].shape[1:]).copy_(mine[at])
    with interpreter_loops(), patch.object(torch, "empty", empty):
        y = run(mine)
    return [each.cpu() for each in (y, mine[2], mine[9])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [DECODE, PADDED, YOUNG], ids=["decode", "padded", "young"])
@pytest.mark.parametrize(("by_channel", "dtype"), [(False, torch.float16), (True, torch.float32)])
def test_kernel_gives_what_three_kernels_give(
    step: Step, shape: str, by_channel: bool, dtype: torch.dtype, device: str
) -> None:
    args = arguments(step, shape, dtype, by_channel)
    found = results(lambda given: delta_token.implementation("cuda")(*given), args, device)
    separate = results(lambda given: three(tuple(each.implementation("cuda") for each in PARTS), given), args, device)
    wanted = results(lambda given: three(tuple(each.reference for each in PARTS), given), args, "cpu")
    near = 3e-4 if dtype is torch.float32 else 3e-2
    for mine, same, right in zip(found, separate, wanted, strict=True):
        scale = max(1.0, float(right.nan_to_num().abs().max()))
        exact = 0.0 if device == "cpu" else near  # a card may sum in another order
        torch.testing.assert_close(mine, same, rtol=exact, atol=exact * scale, equal_nan=True)
        torch.testing.assert_close(mine, right, rtol=near, atol=near * scale, equal_nan=True)
    assert found[0].isfinite().all()
    assert not found[0][~step.live].any()


def test_reading_ahead_gives_the_same(device: str) -> None:
    args = arguments(PADDED, "more values", torch.float16, False)
    found = []
    for ahead in (False, True):
        with patch.object(triton, "AHEAD", ahead):
            found.append(results(lambda given: triton.delta_token(*given), args, device))
    for mine, same in zip(*found, strict=True):
        assert torch.equal(mine.nan_to_num(9), same.nan_to_num(9))


def test_heads_that_no_program_can_hold_take_three_kernels(device: str) -> None:
    args = arguments(PADDED, "more values", torch.float32, False)
    found = results(lambda given: triton.delta_token(*given), args, device)
    with patch.object(triton, "MOST_HELD", 100), patch.object(triton, "delta_token_kernel", None):
        others = results(lambda given: triton.delta_token(*given), args, device)
    for mine, same in zip(found, others, strict=True):
        torch.testing.assert_close(mine, same, rtol=3e-4, atol=3e-4, equal_nan=True)


def test_reference_reads_nothing_on_the_host() -> None:
    args = arguments(DECODE, "more values", torch.float32, False)
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]
    assert delta_token.reference(*meta).shape == delta_token(*meta).shape == args[10].shape
