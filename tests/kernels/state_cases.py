"""Steps with every kind of row, and what is checked of each operation on states: CPU forms and Triton kernels against the
references, which read nothing on the host."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from headway.core.chunks import CHUNKS_AT, chunk_table, most_chunks
from headway.kernels.causal_conv import causal_conv
from headway.kernels.gated_delta import gated_delta
from headway.kernels.registry import Op
from headway.kernels.replay_rows import replay_rows
from headway.kernels.selective_scan import selective_scan
from headway.kernels.ssd_scan import ssd_scan
from headway.kernels.testing import interpreter_loops

S = 8


class Step:
    """Rows of (tokens, position of the first, slot): decode rows, a fresh row of one token, chunks that go on, a zombie (its
    length is 0), and padding.

    Args:
        spare: tokens behind the rows for each row of padding.
        short: rows of so many tokens or fewer are in no chunk.
        stored: rows have rings; of each row the tokens that its stored state has seen, and when it is stored.
    """

    def __init__(
        self,
        rows: list[tuple[int, int, int]],
        zombies: tuple[int, ...] = (),
        pad: int = 1,
        spare: int = 2,
        short: int = 1,
        stored: list[tuple[int, int]] | None = None,
    ) -> None:
        lens = [count for count, _, _ in rows]
        starts = np.cumsum([0, *lens, *[0] * pad]).astype(np.int32)
        self.tokens = int(starts[-1]) + spare * pad
        self.slots = [slot for _, _, slot in rows]
        ends = [0 if i in zombies else count + start for i, (count, start, _) in enumerate(rows)]
        table = chunk_table(np.array([*lens, *[0] * pad], np.int32), short)
        packed = np.zeros(20 + len(table), np.int32)
        packed[CHUNKS_AT : CHUNKS_AT + 2] = 20, len(table) // 2
        packed[20:] = table
        self.live = torch.zeros(self.tokens, dtype=torch.bool)
        for i in range(len(rows)):
            self.live[starts[i] : starts[i + 1]] = i not in zombies
        self.written = [slot for i, slot in enumerate(self.slots) if i not in zombies]
        self.stored = stored
        if stored is not None:
            self.storing = [slot for slot, (_, store) in zip(self.slots, stored, strict=True) if store >= 0]
            at = [*stored, *[(0, -1)] * pad]
            self.rings: tuple[torch.Tensor, ...] = tuple(torch.tensor(at, dtype=torch.int32).T.contiguous())
        longest = max(lens)
        slots = torch.tensor(self.slots + [-1] * pad, dtype=torch.int32)
        self.args: tuple[Any, ...] = (
            torch.from_numpy(starts), slots, torch.tensor(ends + [0] * pad, dtype=torch.int32), torch.from_numpy(packed),
            most_chunks(self.tokens, len(rows) + pad, longest, short), longest, short,
        )  # fmt: skip


MIXED = Step([(1, 4, 3), (1, 0, 0), (5, 7, 1), (1, 9, 5), (66, 70, 2), (3, 0, 4), (2, 1, 6)], zombies=(3,))
DECODE = Step([(1, 4, 3), (1, 0, 0), (1, 9, 5), (1, 60, 2)], zombies=(2,))
PADDED = Step([(1, 4, 3), (1, 0, 0), (1, 9, 5), (1, 60, 2)], zombies=(2,), pad=3, spare=1)
"""As many tokens as rows, as in a graph: rows that are not live set their outputs to zeros."""
STEPS = {"mixed": MIXED, "decode": DECODE, "padded": PADDED, "alone": Step([(67, 0, 1)], pad=0)}
LONG = {
    "long": Step(
        [(130, 0, 1), (70, 5, 2), (1, 4, 3), (64, 64, 0), (3, 0, 6), (1, 3, 5)], zombies=(1, 5), pad=2, spare=150
    ),
}
"""Rows of one chunk and of several, a long zombie before a short row, and more tokens behind the rows than a chunk has."""
PLACES = 11
"""Of the rings."""
DRAFTS = Step(
    [(4, 4, 3), (4, 17, 5), (4, 33, 2), (4, 12, 0)], (2,), short=4, stored=[(2, -1), (10, 18), (0, -1), (12, -1)]
)
REPLAYS = {
    "drafts": DRAFTS,
    "beside prompts": Step(
        [(3, 8, 3), (3, 31, 7), (9, 0, 5), (2, 9, 2), (1, 0, 1), (4, 40, 0), (2, 5, 6)],
        (6,),
        short=3,
        stored=[(3, 9), (24, -1), (0, 9), (9, 11), (0, 1), (40, 44), (0, -1)],
    ),
    "plain": Step([(1, 8, 3), (1, 12, 0), (1, 5, 2), (1, 9, 6)], (2,), stored=[(1, -1), (12, 13), (0, -1), (3, -1)]),
}
"""Rows of drafts, of which some store their states, beside prompts; and rings where there are no drafts."""


def drafts_of(width: int, places: int) -> Step:
    """Rows of up to ``width`` tokens, as many tokens as a graph of such rows has, with rings of ``places``: in turn a row that
    stores its state behind its first token, one that has filled its ring, a zombie, one that runs none again, a fresh one, one
    that had no state before, and padding."""
    again = min(3, places - width)
    rows = [(width, 9, 3), (1, 31, 5), (width, 33, 2), ((width + 1) // 2, 12, 0), (width, 0, 6), (min(width, 2), 1, 7)]
    stored = [(9 - again, 10), (31 - places + 1, -1), (33, -1), (12, -1), (0, width), (0, 1 + min(width, 2))]
    spare = 7 * width - sum(count for count, _, _ in rows)
    return Step(rows, (2,), pad=1, spare=spare, short=width, stored=stored)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def wide(tokens: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider matrix, as projections are."""
    return rand(tokens, channels + 5, dtype=dtype)[:, 3 : channels + 3]


def conv_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    x, ring = wide(step.tokens, 21, dtype), states(5, 21, dtype=dtype)
    return x, rand(21, 4, dtype=dtype), rand(21, dtype=dtype), ring, *step.args, True


def bare_conv_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    return wide(step.tokens, 6, dtype), rand(6, 3, dtype=dtype), None, states(3, 6, dtype=dtype), *step.args, False


def scan_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    t, d, n = step.tokens, 11, 5
    return (
        wide(t, d, dtype), wide(t, d, dtype), rand(d), -rand(d, n).abs(), wide(t, n, dtype), wide(t, n, dtype), rand(d),
        wide(t, d, dtype), states(d, n), *step.args,
    )  # fmt: skip


def ssd_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    t, h, p, g, n = step.tokens, 4, 6, 2, 5
    x, b, c = wide(t, h * p, dtype), wide(t, g * n, dtype), wide(t, g * n, dtype) * 0.5
    shaped = x.unflatten(1, (h, p)), wide(t, h, dtype), rand(h), -rand(h).abs()
    return *shaped, b.unflatten(1, (g, n)), c.unflatten(1, (g, n)), rand(h), 0.02, 1.5, states(h, p, n), *step.args


def lightning_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    t, h, p, n = step.tokens, 2, 20, 18
    x, b, c = (rand(t, h, size, dtype=dtype) * 0.3 for size in (p, n, n))
    return x, None, None, -rand(h).abs(), b, c, None, 0.0, float("inf"), states(h, p, n), *step.args


def delta_case(
    step: Step, dtype: torch.dtype, channels: bool = False, sizes: tuple[int, int] = (9, 7)
) -> tuple[Any, ...]:
    t, hk, h, (k, v) = step.tokens, 2, 4, sizes
    q, key = (wide(t, hk * k, dtype).unflatten(1, (hk, k)) for _ in range(2))
    key = key + 0.7  # keys that resemble each other: the worst case of the triangular system
    a = rand(t, h, k, dtype=dtype) if channels else wide(t, h, dtype)
    bias = rand(h, k) if channels else rand(h)
    values, beta = wide(t, h * v, dtype).unflatten(1, (h, v)), wide(t, h, dtype)
    return q, key, values, a, rand(h) - 2, bias, beta, 2.0, k**-0.5, states(h, k, v), *step.args


def by_channel_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    return delta_case(step, dtype, channels=True)


def wide_delta_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    return delta_case(step, dtype, sizes=(72, 40))


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[S, *shape], a part of what lies in each slot."""
    count = math.prod(shape)
    return rand(S, count + 7, dtype=dtype)[:, 4 : count + 4].unflatten(1, shape)


Make = Callable[[Step, torch.dtype], tuple[Any, ...]]
CASES: dict[str, tuple[Op, int, Make]] = {
    "conv": (causal_conv, 3, conv_case),
    "bare-conv": (causal_conv, 3, bare_conv_case),
    "selective": (selective_scan, 8, scan_case),
    "ssd": (ssd_scan, 9, ssd_case),
    "lightning": (ssd_scan, 9, lightning_case),
    "delta": (gated_delta, 9, delta_case),
    "delta-by-channel": (gated_delta, 9, by_channel_case),
    "delta-wide": (gated_delta, 9, wide_delta_case),
}


def compare(
    op: Op, run: Callable[..., torch.Tensor], state_at: int, step: Step, args: tuple[Any, ...], to: str = "cpu"
) -> None:
    """``run`` gives what the reference gives, for live tokens; states of live rows are the same, all others untouched."""
    old = args[state_at]
    for slot in {*range(S)} - {*step.written}:
        old[slot] = float("nan")
    mine = [each.to(to) if isinstance(each, torch.Tensor) else each for each in args]
    around = torch.zeros(S, old[0].numel() + 7, dtype=old.dtype, device=to)
    mine[state_at] = around[:, 4 : old[0].numel() + 4].unflatten(1, old.shape[1:]).copy_(old)
    theirs = [each.clone() if each is old else each for each in args]
    wanted, found = op.reference(*theirs), run(*mine).cpu()
    tolerance = {torch.float32: 3e-4, torch.float16: 2e-2}.get(wanted.dtype, 6e-2)
    scale = max(1.0, float(wanted[step.live].float().abs().max()))
    torch.testing.assert_close(found[step.live], wanted[step.live], atol=tolerance * scale, rtol=tolerance)
    assert found[~step.live].isfinite().all()
    if run is op.implementation("cuda"):
        assert not found[~step.live].any(), "tokens that are nobody's have outputs"
    state = mine[state_at].cpu()
    spread = max(1.0, float(theirs[state_at][step.written].float().abs().max()))
    torch.testing.assert_close(
        state[step.written], theirs[state_at][step.written], atol=tolerance * spread, rtol=tolerance
    )
    rest = [slot for slot in range(S) if slot not in step.written]
    torch.testing.assert_close(state[rest], old[rest], rtol=0, atol=0, equal_nan=True)


def poisoned() -> AbstractContextManager[Any]:
    """Memory that nobody has written holds NaN."""
    return patch.object(torch, "empty", lambda size, **kind: torch.full(tuple(size), float("nan"), **kind))


def check_cpu(case: str, step: str) -> None:
    op, state_at, make = CASES[case]
    chosen = (STEPS | REPLAYS | LONG)[step]
    compare(op, op.implementation("cpu"), state_at, chosen, make(chosen, torch.float32))


def check_kernel(case: str, step: str, dtype: torch.dtype, device: str) -> None:
    op, state_at, make = CASES[case]
    with interpreter_loops(), poisoned():
        chosen = (STEPS | REPLAYS | LONG)[step]
        compare(op, op.implementation("cuda"), state_at, chosen, make(chosen, dtype), device)


def check_replays(
    case: str, step: str, form: str, device: str = "cpu", dtype: torch.dtype = torch.float32, places: int = PLACES
) -> None:
    """As ``compare``, with rings: also these are the same, and places that no row writes untouched. What may not be read is not
    a number."""
    op, state_at, make = CASES[case]
    chosen = REPLAYS[step]
    args, inputs = list(make(chosen, dtype)), rings_of(case, chosen, places).to(dtype)
    for slot in {*range(S)} - {*chosen.written}:
        args[state_at][slot] = float("nan")

    def run(function: Callable[..., torch.Tensor], to: str) -> tuple[torch.Tensor, ...]:
        given = [each.to(to) if isinstance(each, torch.Tensor) else each for each in args]
        given[state_at], ring = args[state_at].clone().to(to), inputs.clone().to(to)
        with interpreter_loops(), poisoned():
            y = function(*given, ring, *(each.to(to) for each in chosen.rings))
        if form == "cuda" and function is not op.reference:  # the others promise nothing of nobody's tokens
            assert not y.cpu()[~chosen.live].any(), "tokens that are nobody's have outputs"
        return y.cpu()[chosen.live], given[state_at].cpu(), ring.cpu()

    wanted, states_wanted, rings_wanted = run(op.reference, "cpu")
    found, states_found, rings_found = run(op.implementation(form), device)
    scale, tolerance = max(1.0, float(wanted.abs().max())), 3e-4 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found, wanted, atol=tolerance * scale, rtol=tolerance)
    torch.testing.assert_close(states_found, states_wanted, atol=3e-4, rtol=3e-4, equal_nan=True)
    torch.testing.assert_close(rings_found, rings_wanted, atol=3e-4, rtol=3e-4, equal_nan=True)
    rest = [slot for slot in range(S) if slot not in chosen.storing]
    torch.testing.assert_close(states_found[rest], args[state_at][rest], rtol=0, atol=0, equal_nan=True)


def rings_of(case: str, step: Step, places: int = PLACES) -> torch.Tensor:
    """Inputs [S, places, E] of the tokens that rows run again, all else not a number."""
    size = {"selective": 2 * 11 + 5, "ssd": 4 * 6 + 2 * 5 + 4, "lightning": 2 * 20 + 2 * 18}.get(case)
    if size is None:
        size = 2 * 9 + 4 * 7 + 4 * (9 if case == "delta-by-channel" else 1)
    found = torch.full((S, places, size), float("nan"))
    assert step.stored is not None
    starts, lens = step.args[0].tolist(), step.args[2].tolist()
    for row, (slot, (stored, _)) in enumerate(zip(step.slots, step.stored, strict=True)):
        for position in range(stored, lens[row] - starts[row + 1] + starts[row]):
            values = rand(size, position + 1)[:, 0] * 0.3
            found[slot, position % places] = -values.abs() if case.startswith("delta") else values
    return found


def assert_same(found: torch.Tensor, wanted: torch.Tensor, device: str, what: str) -> None:
    """The same bits. On a card both sum in one order, but of two forms of a kernel the compiler may round a product before it
    is added in one alone."""
    near = 0.0 if device == "cpu" else {torch.float32: 1e-5}.get(found.dtype, 2e-3)
    torch.testing.assert_close(found, wanted, rtol=near, atol=near, msg=lambda text: f"{what}: {text}")


def check_walk(case: str) -> None:
    """Rows of drafts that are rejected at random give, token by token, what rows of one token without a ring give."""
    op, state_at, make = CASES[case]
    width, total, slot = 3, 40, 1
    whole = list(make(Step([(total, 0, slot)], pad=0), torch.float32))
    tokens = [i for i, each in enumerate(whole) if isinstance(each, torch.Tensor) and len(each) == total]
    wanted = op.reference(*[each.clone() if isinstance(each, torch.Tensor) else each for each in whole])
    state = torch.full_like(whole[state_at], float("nan"))
    storage, rng = torch.zeros(S, 4, dtype=torch.int32), random.Random(7)
    ring = torch.full_like(rings_of(case, DRAFTS), float("nan"))
    at, stores = 0, 0
    while at < total:
        count, drafts = (min(5, total), False) if at == 0 else (min(width, total - at), True)
        step = Step([(count, at, slot)], pad=0, short=width, stored=[(0, 0)])
        step.args[3][2], step.args[3][4], step.args[3][6] = 1, 12, int(count == 1 and drafts)
        step.args[3][12:16] = torch.tensor([slot, count, 0, count if drafts else 1])
        stored_at, store_at = torch.zeros(2, 1, dtype=torch.int32)
        replay_rows.reference(storage, step.args[3], *step.args[:3], stored_at, store_at, PLACES, width)
        accepted = rng.randrange(1, count + 1) if drafts else count
        given = list(whole)
        for i in tokens:
            own = whole[i][at : at + count].clone()
            own[accepted:] += 1.0  # another token was drafted
            given[i] = own
        given[state_at], given[state_at + 1 :] = state, step.args
        found = op.reference(*given, ring, stored_at, store_at)
        torch.testing.assert_close(found[:accepted], wanted[at : at + accepted], atol=1e-5, rtol=1e-5)
        stores += int(store_at) >= 0
        at += accepted
    assert 4 <= stores < 10, "states are stored once in several rows"


def check_meta(case: str) -> None:
    """The reference runs without data, so it reads none on the host."""
    op, _, make = CASES[case]
    args = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in make(DECODE, torch.float32)]
    assert op.reference(*args).shape == op(*args).shape


def check_rounding(case: str) -> None:
    """A state in half precision is rounded once a step, not once a token."""
    op, state_at, make = CASES[case]
    args = list(make(MIXED, torch.float32))
    args[state_at] = args[state_at].bfloat16()
    exact = [args[state_at].float() if i == state_at else each for i, each in enumerate(args)]
    op.reference(*args)
    op.reference(*exact)
    torch.testing.assert_close(args[state_at][MIXED.written], exact[state_at][MIXED.written].bfloat16(), rtol=0, atol=0)
