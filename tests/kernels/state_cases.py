"""Steps with every kind of row, and what is checked of each operation on states: CPU forms and Triton kernels against the
references, which read nothing on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headway.core.chunks import CHUNKS_AT, chunk_table, most_chunks
from headway.kernels.causal_conv import causal_conv
from headway.kernels.gated_delta import gated_delta
from headway.kernels.registry import Op
from headway.kernels.selective_scan import selective_scan
from headway.kernels.ssd_scan import ssd_scan
from headway.kernels.testing import interpreter_loops

S = 8


class Step:
    """Rows of (tokens, position of the first, slot): decode rows, a fresh row of one token, chunks that go on, a zombie (its
    length is 0), and padding."""

    def __init__(self, rows: list[tuple[int, int, int]], zombies: tuple[int, ...] = (), pad: int = 1) -> None:
        lens = [count for count, _, _ in rows]
        starts = np.cumsum([0, *lens, *[0] * pad]).astype(np.int32)
        self.tokens = int(starts[-1]) + 2 * pad
        self.slots = [slot for _, _, slot in rows]
        ends = [0 if i in zombies else count + start for i, (count, start, _) in enumerate(rows)]
        table = chunk_table(np.array([*lens, *[0] * pad], np.int32))
        packed = np.zeros(20 + len(table), np.int32)
        packed[CHUNKS_AT : CHUNKS_AT + 2] = 20, len(table) // 2
        packed[20:] = table
        self.live = torch.zeros(self.tokens, dtype=torch.bool)
        for i in range(len(rows)):
            self.live[starts[i] : starts[i + 1]] = i not in zombies
        self.written = [slot for i, slot in enumerate(self.slots) if i not in zombies]
        longest = max(lens)
        slots = torch.tensor(self.slots + [-1] * pad, dtype=torch.int32)
        self.args: tuple[Any, ...] = (
            torch.from_numpy(starts), slots, torch.tensor(ends + [0] * pad, dtype=torch.int32), torch.from_numpy(packed),
            most_chunks(self.tokens, len(rows) + pad, longest), longest,
        )  # fmt: skip


MIXED = Step([(1, 4, 3), (1, 0, 0), (5, 7, 1), (1, 9, 5), (66, 70, 2), (3, 0, 4), (2, 1, 6)], zombies=(3,))
DECODE = Step([(1, 4, 3), (1, 0, 0), (1, 9, 5), (1, 60, 2)], zombies=(2,))
STEPS = {"mixed": MIXED, "decode": DECODE, "alone": Step([(67, 0, 1)], pad=0)}


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


def delta_case(step: Step, dtype: torch.dtype, channels: bool = False) -> tuple[Any, ...]:
    t, hk, h, k, v = step.tokens, 2, 4, 9, 7
    q, key = (wide(t, hk * k, dtype).unflatten(1, (hk, k)) for _ in range(2))
    key = key + 0.7  # keys that resemble each other: the worst case of the triangular system
    a = rand(t, h, k, dtype=dtype) if channels else wide(t, h, dtype)
    bias = rand(h, k) if channels else rand(h)
    values, beta = wide(t, h * v, dtype).unflatten(1, (h, v)), wide(t, h, dtype)
    return q, key, values, a, rand(h) - 2, bias, beta, 2.0, k**-0.5, states(h, k, v), *step.args


def by_channel_case(step: Step, dtype: torch.dtype) -> tuple[Any, ...]:
    return delta_case(step, dtype, channels=True)


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
    state = mine[state_at].cpu()
    spread = max(1.0, float(theirs[state_at][step.written].float().abs().max()))
    torch.testing.assert_close(
        state[step.written], theirs[state_at][step.written], atol=tolerance * spread, rtol=tolerance
    )
    rest = [slot for slot in range(S) if slot not in step.written]
    torch.testing.assert_close(state[rest], old[rest], rtol=0, atol=0, equal_nan=True)


def check_cpu(case: str, step: str) -> None:
    op, state_at, make = CASES[case]
    compare(op, op.implementation("cpu"), state_at, STEPS[step], make(STEPS[step], torch.float32))


def check_kernel(case: str, step: str, dtype: torch.dtype, device: str) -> None:
    op, state_at, make = CASES[case]
    with interpreter_loops():
        compare(op, op.implementation("cuda"), state_at, STEPS[step], make(STEPS[step], dtype), device)


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
