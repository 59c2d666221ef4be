"""``ssd_decode``: its forms against the reference, and its kernel against those of the operations it is made of, in the
interpreter bit by bit; with drafts, of any number and whatever is accepted, against rows of one token, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.core.chunks import ring_places
from headway.kernels.causal_conv.triton import causal_conv
from headway.kernels.ssd_decode import ssd_decode
from headway.kernels.ssd_decode.reference import composed
from headway.kernels.ssd_scan.triton import ssd_scan
from headway.kernels.testing import interpreter_loops, kernel_dtypes
from tests.kernels.state_cases import DECODE, PADDED, Step, assert_same, drafts_of, poisoned, rand, states, wide

S = 8
SHAPES = {"odd": (4, 6, 2, 5, 4, 0, True), "blocks": (3, 37, 3, 130, 3, 2, False), "alone": (2, 16, 1, 16, 2, 1, True)}
"""Heads, P, groups, N, taps, places of the window beyond those that it needs, and whether there is a bias."""
STEPS = {
    "decode": DECODE,
    "padded": PADDED,
    "young": Step([(1, 1, 3), (1, 2, 0), (1, 0, 5), (1, 3, 2)], zombies=(0,), pad=2, spare=1),
}
"""With tokens behind the rows, as in a graph, and at positions from which windows reach back to the beginning."""


WINDOW, STATE, STEP, INPUTS = 3, 10, 11, 18
"""Where arguments stand."""


def case(step: Step, shape: str, dtype: torch.dtype, state_dtype: torch.dtype, replays: int = 0) -> list[Any]:
    """What rows must not read is not a number. ``replays``: places of rings."""
    h, p, g, n, taps, more, bias = SHAPES[shape]
    t, c, places = step.tokens, h * p + 2 * g * n, taps + step.args[5] - 1 + more
    x, ring, state = wide(t, c, dtype), states(places, c, dtype=dtype), states(h, p, n, dtype=state_dtype)
    inputs = rand(S, max(replays, 1), h * p + g * n + h, dtype=dtype)
    for slot in range(S):
        row = step.slots.index(slot) if slot in step.written else None
        start = 0 if row is None else int(step.args[2][row] - step.args[0].diff()[row])
        stored = start if row is None or step.stored is None else step.stored[row][0]
        seen = {(start - back) % places for back in range(1, min(taps, start + 1))}
        ring[slot, [place for place in range(places) if place not in seen]] = float("nan")
        again = [position % replays for position in range(stored, start)]
        inputs[slot, [place for place in range(replays) if place not in again]] = float("nan")
        if not stored:
            state[slot] = float("nan")  # what a slot held before its row began means nothing
    weights = rand(c, taps, dtype=dtype), rand(c, dtype=dtype) if bias else None
    tensors = x, *weights, ring, wide(t, h, dtype), rand(h), -rand(h).abs(), rand(h), 0.02, 1.5, state
    return [*tensors, *step.args, *((inputs, *step.rings) if replays else ())]


def run(form: Callable[..., torch.Tensor], args: list[Any], device: str) -> tuple[torch.Tensor, ...]:
    """(what it gives, windows, states, rings); the states stay parts of what lies in each slot."""
    given = [each.clone().to(device) if isinstance(each, torch.Tensor) else each for each in args]
    for at in (WINDOW, STATE):
        old = args[at]
        around = torch.full((S, old[0].numel() + 7), float("nan"), dtype=old.dtype, device=device)
        given[at] = around[:, 4 : old[0].numel() + 4].unflatten(1, old.shape[1:]).copy_(old)
    with interpreter_loops(), poisoned():
        y = form(*given)
    return tuple(each.cpu() for each in (y, given[WINDOW], given[STATE], *given[INPUTS : INPUTS + 1]))


def both(*args: Any) -> torch.Tensor:
    """The kernels of the two operations."""
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


@pytest.mark.parametrize("width", range(1, 9))
def test_rows_of_drafts_and_rings(width: int, device: str) -> None:
    """Rows of mixed numbers of tokens, which store their states behind their first token, behind their last one or not at all,
    and run as many again as a ring can hold, or none."""
    places, shape = ring_places(3, width), [*SHAPES][width % 3]
    step = drafts_of(width, places)
    args = case(step, shape, torch.float32, torch.float32, places)
    wanted = run(ssd_decode.reference, args, "cpu")
    for form, at in (("cpu", "cpu"), ("cuda", device)):
        found = run(ssd_decode.implementation(form), args, at)
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right, atol=3e-4, rtol=3e-4, equal_nan=True)
        assert not found[0][~step.live].any(), "zeros where no row is live"


def test_rows_without_rings_store_their_last_states(device: str) -> None:
    step = Step([(3, 4, 3), (1, 0, 0), (2, 9, 5), (3, 60, 2)], zombies=(2,), short=3)
    args = case(step, "odd", torch.float32, torch.float32)
    wanted = run(ssd_decode.reference, args, "cpu")
    for mine, right in zip(run(ssd_decode.implementation("cuda"), args, device), wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=3e-4, rtol=3e-4, equal_nan=True)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 4), (torch.float32, 3)])
def test_rejected_drafts_leave_the_bits_of_rows_of_one_token(dtype: torch.dtype, width: int, device: str) -> None:
    """A token's outputs are, to the last bit, those of a row of one token whose state was stored at every step, however many
    drafts stood before it, were accepted, or had to be run again."""
    slot, total, places, rng = 1, 14, ring_places(2, width), random.Random(5)
    form = ssd_decode.implementation("cuda")

    def step_of(count: int, start: int, stored: list[tuple[int, int]] | None, longest: int) -> Step:
        return Step([(count, start, slot)], pad=0, short=longest, stored=stored)

    whole = case(Step([(total, 0, slot)], pad=0, short=total), "odd", dtype, torch.float32)
    h, p, g, n, taps, *_ = SHAPES["odd"]

    def cut(at: int, count: int, step: Step, kept: list[torch.Tensor], rings: tuple[torch.Tensor, ...]) -> list[Any]:
        mine = [each[at : at + count].clone() if i in (0, 4) else each for i, each in enumerate(whole[:STEP])]
        mine[WINDOW], mine[STATE] = kept[:2]
        return [*mine, *step.args, *rings]

    def empty() -> list[torch.Tensor]:
        shapes = (S, taps + width - 1, whole[0].shape[1]), (S, places, h * p + g * n + h)
        window, inputs = (torch.full(shape, float("nan"), dtype=dtype) for shape in shapes)
        return [window, torch.full(whole[STATE].shape, float("nan")), inputs]

    plain, kept = [], empty()
    for at in range(total):
        y, *kept[:2] = run(form, cut(at, 1, step_of(1, at, None, 1), kept, ()), device)
        plain.append((y[0], kept[1][slot]))
    kept, stored, at, again = empty(), 0, 0, 0
    while at < total:
        count = min(width, total - at)
        store = at + 1 if at + count + width - stored > places else -1
        step = step_of(count, at, [(stored, store)], width)
        given = cut(at, count, step, kept, (kept[2], *step.rings))
        accepted = rng.randrange(1, count + 1)
        for i in (0, 4):
            given[i][accepted:] += 1.0  # another token was drafted
        again += at - stored
        y, *kept = run(form, given, device)
        for i in range(accepted):
            assert_same(y[i], plain[at + i][0], device, f"token {at + i}, {i} of its row, {at - stored} again")
        if store >= 0:
            stored = store
            assert_same(kept[1][slot], plain[at][1], device, f"the state that is stored at {store}")
        at += accepted
    assert again >= 8, "hardly any token is run again"


def test_reference_reads_nothing_on_the_host() -> None:
    args = [
        each.to("meta") if isinstance(each, torch.Tensor) else each
        for each in case(DECODE, "odd", torch.float32, torch.float32)
    ]
    assert ssd_decode.reference(*args).shape == ssd_decode(*args).shape
