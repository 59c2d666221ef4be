"""``gated_delta``: its CPU form and its kernel against the reference, on every kind of row."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from headway.kernels.gated_delta import gated_delta, triton
from headway.kernels.testing import interpreter_loops
from tests.kernels.state_cases import (
    CASES,
    LONG,
    REPLAYS,
    STEPS,
    Step,
    check_cpu,
    check_kernel,
    check_meta,
    check_replays,
    check_rounding,
    check_walk,
    compare,
    delta_case,
)

cases = pytest.mark.parametrize("case", ["delta", "delta-by-channel"])


@cases
@pytest.mark.parametrize("step", STEPS)
def test_cpu_form_equals_reference(case: str, step: str) -> None:
    check_cpu(case, step)


@cases
@pytest.mark.parametrize("step", [*STEPS, *LONG])
def test_kernel_equals_reference(case: str, step: str, device: str) -> None:
    assert CASES[case][0] is gated_delta
    check_kernel(case, step, torch.float32, device)


@cases
@pytest.mark.parametrize("step", ["decode", "alone"])
def test_kernel_in_half_precision(case: str, step: str, device: str) -> None:
    check_kernel(case, step, torch.float16, device)


@pytest.mark.parametrize("step", [*STEPS, *LONG])
def test_chunks_of_64_tokens(step: str, device: str) -> None:
    """In float32 they show what the arithmetic is worth; bfloat16, which they are for, the interpreter does not multiply. Keys
    resemble each other, with beta up to 2."""
    if device != "cpu":
        check_kernel("delta-wide", step, torch.bfloat16, device)
        return
    with patch.object(triton, "takes_64_tokens", lambda v, keys, by_channel: True):
        check_kernel("delta-wide", step, torch.float32, device)


@cases
def test_reference_reads_nothing_on_the_host(case: str) -> None:
    check_meta(case)


@cases
def test_state_in_half_precision_is_rounded_once_a_step(case: str) -> None:
    check_rounding(case)


@cases
@pytest.mark.parametrize("step", REPLAYS)
@pytest.mark.parametrize("form", ["cpu", "cuda"])
def test_rings_of_inputs(case: str, step: str, form: str, device: str) -> None:
    check_replays(case, step, form, device if form == "cuda" else "cpu")


@cases
def test_rows_of_rejected_drafts_give_what_rows_of_one_token_give(case: str) -> None:
    check_walk(case)


ODD = Step([(15, 3, 0), (16, 0, 4), (17, 5, 2), (8, 1, 6), (33, 64, 1)])


@pytest.mark.parametrize("form", ["cpu", "cuda"])
def test_decays_of_channels_may_be_as_strong_as_they_like(form: str, device: str) -> None:
    """Of one head some channels keep all, some lose a little, and some everything at once, from token to token: nothing
    overflows, and what is weak is not lost beside what is strong. Rows end in the middle of chunks, and at their ends."""
    args = list(delta_case(ODD, torch.float32, channels=True))
    steps = torch.tensor([-12.0, -2.0, 0.5, 40.0, 30_000.0])
    args[3] = steps[torch.randint(len(steps), args[3].shape, generator=torch.Generator().manual_seed(3))]
    with interpreter_loops():
        compare(gated_delta, gated_delta.implementation(form), 9, ODD, tuple(args), device if form == "cuda" else "cpu")
