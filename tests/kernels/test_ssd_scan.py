"""``ssd_scan``: its CPU form and its kernel against the reference, on every kind of row."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.ssd_scan import ssd_scan
from tests.kernels.state_cases import (
    CASES,
    LONG,
    PLACES,
    REPLAYS,
    STEPS,
    check_cpu,
    check_kernel,
    check_meta,
    check_replays,
    check_rounding,
    check_walk,
)

cases = pytest.mark.parametrize("case", ["ssd", "lightning"])


@cases
@pytest.mark.parametrize("step", STEPS)
def test_cpu_form_equals_reference(case: str, step: str) -> None:
    check_cpu(case, step)


@cases
@pytest.mark.parametrize("step", [*STEPS, *LONG])
def test_kernel_equals_reference(case: str, step: str, device: str) -> None:
    assert CASES[case][0] is ssd_scan
    check_kernel(case, step, torch.float32, device)


@cases
def test_kernel_in_half_precision(case: str, device: str) -> None:
    check_kernel(case, "decode", torch.float16, device)


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
@pytest.mark.parametrize("step", ["drafts", "beside prompts"])
def test_rings_of_more_places_than_a_chunk(case: str, step: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, places = (4, PLACES) if device == "cpu" else (16, 40)  # a card's products take 16 and more
    monkeypatch.setattr("headway.kernels.ssd_scan.triton.WALKED_CHUNKS", (chunk, chunk))
    check_replays(case, step, "cuda", device, places=places)


@cases
def test_rings_in_half_precision(case: str, device: str) -> None:
    check_replays(case, "drafts", "cuda", device, torch.float16)


@cases
def test_rows_of_rejected_drafts_give_what_rows_of_one_token_give(case: str) -> None:
    check_walk(case)
