"""``causal_conv``: its CPU form and its kernel against the reference, on every kind of row."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.causal_conv import causal_conv
from tests.kernels.state_cases import CASES, LONG, REPLAYS, STEPS, check_cpu, check_kernel, check_meta

cases = pytest.mark.parametrize("case", ["conv", "bare-conv"])


@cases
@pytest.mark.parametrize("step", [*STEPS, *REPLAYS, *LONG])
def test_cpu_form_equals_reference(case: str, step: str) -> None:
    check_cpu(case, step)


@cases
@pytest.mark.parametrize("step", [*STEPS, *REPLAYS, *LONG])
def test_kernel_equals_reference(case: str, step: str, device: str) -> None:
    assert CASES[case][0] is causal_conv
    check_kernel(case, step, torch.float32, device)


@cases
def test_kernel_in_half_precision(case: str, device: str) -> None:
    check_kernel(case, "decode", torch.float16, device)


@cases
def test_reference_reads_nothing_on_the_host(case: str) -> None:
    check_meta(case)
