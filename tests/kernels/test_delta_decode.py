"""``delta_decode``: its kernel gives the bits of the three kernels that it stands in for, and what their references give; with
drafts, of any number and whatever is accepted, the bits of rows of one token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.core.chunks import ring_places
from headway.kernels.causal_conv import causal_conv
from headway.kernels.delta_decode import delta_decode, triton
from headway.kernels.gated_delta import gated_delta
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.kernels.testing import interpreter_loops
from tests.kernels.state_cases import DECODE, PADDED, S, Step, assert_same, drafts_of, poisoned, rand, states, wide

SHAPES = {"more values": (2, 4, 9, 7, 4, 0), "wide values": (1, 3, 5, 18, 3, 2), "one each": (3, 3, 16, 16, 2, 0)}
"""HK, H, K, V, taps, places of a window beyond those that it needs."""
PARTS = causal_conv, gated_delta, gated_rms_norm
YOUNG = Step([(1, 0, 6), (1, 1, 2), (1, 2, 3)], pad=0)
"""Rows whose windows begin before their first token."""
DRAFTS = [(1, False), (2, True), (3, True), (4, False), (5, False), (6, False), (7, True), (8, True)]
"""Tokens of a row, and whether decays are by channel: either of them with every shape, type and half of the widths."""
SELDOM = [(width, not by_channel) for width, by_channel in DRAFTS]
WINDOW, STATE, STEP, INPUTS = 2, 9, 14, 21
"""Where arguments stand."""


def sizes(shape: str, by_channel: bool) -> tuple[int, ...]:
    """Of what a token brings into a ring: keys, u, log decays."""
    hk, h, k, v, *_ = SHAPES[shape]
    return hk * k, h * v, h * (k if by_channel else 1)


def arguments(step: Step, shape: str, dtype: torch.dtype, by_channel: bool, replays: int = 0) -> list[Any]:
    """What slots without a live row have, and what rows must not read, is not a number. ``replays``: places of rings."""
    hk, h, k, v, taps, more = SHAPES[shape]
    t, channels, places = step.tokens, 2 * hk * k + h * v, taps + step.args[5] - 1 + more
    a, bias = (rand(t, h, k, dtype=dtype), rand(h, k)) if by_channel else (wide(t, h, dtype), rand(h))
    window, state = states(places, channels, dtype=dtype), states(h, k, v)
    keys, us, decays = sizes(shape, by_channel)
    inputs = rand(S, max(replays, 1), keys + us + decays) * 0.3
    inputs[..., keys + us :] = -inputs[..., keys + us :].abs()
    starts = (step.args[2] - step.args[0].diff())[: len(step.slots)].tolist()
    for slot in range(S):
        row = step.slots.index(slot) if slot in step.written else None
        start = 0 if row is None else starts[row]
        stored = start if row is None or step.stored is None else step.stored[row][0]
        seen = [position % places for position in range(max(0, start - taps + 1), start)]
        window[slot, [place for place in range(places) if place not in seen]] = float("nan")
        again = [position % replays for position in range(stored, start)]
        inputs[slot, [place for place in range(replays) if place not in again]] = float("nan")
        if not stored:
            state[slot] = float("nan")
    return [
        wide(t, channels, dtype), rand(channels, taps, dtype=dtype), window, a, rand(h) - 2, bias, wide(t, h, dtype), 2.0,
        k**-0.5, state, wide(t, h * v, dtype) * 2, rand(v, dtype=dtype), 1e-5, by_channel, *step.args,
        *((inputs, *step.rings) if replays else ()),
    ]  # fmt: skip


def three(parts: tuple[Callable[..., torch.Tensor], ...], args: list[Any]) -> torch.Tensor:
    x, weight, window, *rule, gate, norm, eps, sigmoid = args[:STEP]
    step, rings = args[STEP:INPUTS], args[INPUTS:]
    convolve, update, normalise = parts
    _, h, k, v = rule[-1].shape
    keys = (x.shape[1] - h * v) // 2
    q, key, value = convolve(x, weight, None, window, *step, True).split((keys, keys, h * v), 1)
    q, key, value = q.unflatten(1, (-1, k)), key.unflatten(1, (-1, k)), value.unflatten(1, (-1, v))
    return normalise(update(q, key, value, *rule, *step, *rings).flatten(1), gate, norm, eps, v, False, sigmoid)


def references(args: list[Any]) -> torch.Tensor:
    return three(tuple(each.reference for each in PARTS), args)


def kernel(args: list[Any]) -> torch.Tensor:
    found: torch.Tensor = delta_decode.implementation("cuda")(*args)
    return found


def results(run: Callable[[list[Any]], torch.Tensor], args: list[Any], device: str) -> list[torch.Tensor]:
    """Outputs, windows, states, rings; outputs are not numbers before they are written."""
    mine = [each.clone().to(device) if isinstance(each, torch.Tensor) else each for each in args]
    for at in (WINDOW, STATE):  # a part of what lies in each slot, as in the pool
        whole = torch.zeros(S, mine[at][0].numel() + 7, dtype=mine[at].dtype, device=device)
        mine[at] = whole[:, 4 : mine[at][0].numel() + 4].unflatten(1, mine[at].shape[1:]).copy_(mine[at])
    with interpreter_loops(), poisoned():
        y = run(mine)
    return [each.cpu() for each in (y, mine[WINDOW], mine[STATE], *mine[INPUTS : INPUTS + 1])]


def check_near(found: list[torch.Tensor], wanted: list[torch.Tensor], near: float) -> None:
    for mine, right in zip(found, wanted, strict=True):
        scale = max(1.0, float(right.nan_to_num().abs().max()))
        torch.testing.assert_close(mine, right, rtol=near, atol=near * scale, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [DECODE, PADDED, YOUNG], ids=["decode", "padded", "young"])
@pytest.mark.parametrize(("by_channel", "dtype"), [(False, torch.float16), (True, torch.float32)])
def test_kernel_gives_what_three_kernels_give(
    step: Step, shape: str, by_channel: bool, dtype: torch.dtype, device: str
) -> None:
    args = arguments(step, shape, dtype, by_channel)
    found = results(kernel, args, device)
    separate = results(lambda given: three(tuple(each.implementation("cuda") for each in PARTS), given), args, device)
    near = 3e-4 if dtype is torch.float32 else 3e-2
    check_near(found, results(references, args, "cpu"), near)
    check_near(found, separate, 0.0 if device == "cpu" else near)  # a card may sum in another order
    assert found[0].isfinite().all()
    assert not found[0][~step.live].any()


@pytest.mark.parametrize(
    ("width", "by_channel"), [*DRAFTS, *(pytest.param(*each, marks=pytest.mark.soak) for each in SELDOM)]
)
def test_rows_of_drafts_and_rings(width: int, by_channel: bool, device: str) -> None:
    """Rows of mixed numbers of tokens, which store their states behind their first token, behind their last one or not at all,
    and run as many again as a ring can hold, or none."""
    shape = [*SHAPES][width % 3]
    dtype = torch.float16 if width % 2 else torch.float32
    places = ring_places(3, width)
    step = drafts_of(width, places)
    args = arguments(step, shape, dtype, by_channel, places)
    found, near = results(kernel, args, device), 3e-4 if dtype is torch.float32 else 3e-2
    check_near(found, results(references, args, "cpu"), near)
    assert found[0].isfinite().all()
    assert not found[0][~step.live].any()


def test_rows_without_rings_store_their_last_states(device: str) -> None:
    step = Step([(3, 4, 3), (1, 0, 0), (2, 9, 5), (3, 60, 2)], zombies=(2,), short=3)
    args = arguments(step, "more values", torch.float32, False)
    check_near(results(kernel, args, device), results(references, args, "cpu"), 3e-4)


@pytest.mark.parametrize(("by_channel", "width"), [(False, 4), (True, 3)])
def test_rejected_drafts_leave_the_bits_of_rows_of_one_token(by_channel: bool, width: int, device: str) -> None:
    """A token's outputs are, to the last bit, those of a row of one token whose state was stored at every step, however many
    drafts stood before it, were accepted, or had to be run again."""
    slot, total, places, rng = 1, 14, ring_places(2, width), random.Random(5)

    def step_of(count: int, start: int, stored: list[tuple[int, int]] | None, longest: int) -> Step:
        return Step([(count, start, slot)], pad=0, short=longest, stored=stored)

    whole = arguments(Step([(total, 0, slot)], pad=0, short=total), "more values", torch.float32, by_channel)
    rows = [i for i, each in enumerate(whole[:STEP]) if isinstance(each, torch.Tensor) and len(each) == total]
    taps = whole[1].shape[1]

    def cut(at: int, count: int, step: Step, kept: list[torch.Tensor], rings: tuple[torch.Tensor, ...]) -> list[Any]:
        mine = [each[at : at + count].clone() if i in rows else each for i, each in enumerate(whole[:STEP])]
        mine[WINDOW], mine[STATE] = kept[:2]
        return [*mine, *step.args, *rings]

    def empty() -> list[torch.Tensor]:
        size = sum(sizes("more values", by_channel))
        shapes = (S, taps + width - 1, whole[0].shape[1]), whole[STATE].shape, (S, places, size)
        return [torch.full(shape, float("nan")) for shape in shapes]

    plain, kept = [], empty()
    for at in range(total):
        y, *kept[:2] = results(kernel, cut(at, 1, step_of(1, at, None, 1), kept, ()), device)
        plain.append((y[0], kept[1][slot]))
    kept, stored, at, again = empty(), 0, 0, 0
    while at < total:
        count = min(width, total - at)
        store = at + 1 if at + count + width - stored > places else -1
        step = step_of(count, at, [(stored, store)], width)
        given = cut(at, count, step, kept, (kept[2], *step.rings))
        accepted = rng.randrange(1, count + 1)
        for i in rows:
            given[i][accepted:] += 1.0  # another token was drafted
        again += at - stored
        y, *kept = results(kernel, given, device)
        for i in range(accepted):
            assert_same(y[i], plain[at + i][0], device, f"token {at + i}, {i} of its row, {at - stored} again")
        if store >= 0:
            stored = store
            assert_same(kept[1][slot], plain[at][1], device, f"the state that is stored at {store}")
        at += accepted
    assert again >= 8, "hardly any token is run again"


def test_reading_ahead_gives_the_same(device: str) -> None:
    args = arguments(PADDED, "more values", torch.float16, False)
    found = []
    for ahead in (False, True):
        with patch.object(triton, "AHEAD", ahead):
            found.append(results(lambda given: triton.delta_decode(*given), args, device))
    for mine, same in zip(*found, strict=True):
        assert torch.equal(mine.nan_to_num(9), same.nan_to_num(9))


@pytest.mark.parametrize("replays", [0, ring_places(3, 3)])
def test_heads_that_no_program_can_hold_take_three_kernels(replays: int, device: str) -> None:
    step = drafts_of(3, replays) if replays else PADDED
    args = arguments(step, "more values", torch.float32, False, replays)
    found = results(lambda given: triton.delta_decode(*given), args, device)
    with patch.object(triton, "MOST_HELD", 100), patch.object(triton, "delta_decode_kernel", None):
        others = results(lambda given: triton.delta_decode(*given), args, device)
    check_near(found, others, 3e-4)


def test_reference_reads_nothing_on_the_host() -> None:
    args = arguments(DECODE, "more values", torch.float32, False)
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]
    assert delta_decode.reference(*meta).shape == delta_decode(*meta).shape == args[10].shape
