"""``gated_rms_norm``: the kernel against the reference, and that against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.gated_rms_norm import gated_rms_norm
from tests.kernels.state_cases import rand, wide


@pytest.mark.parametrize(("group", "shared"), [(12, False), (4, False), (4, True)])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gated_norm(group: int, shared: bool, gate_first: bool, sigmoid: bool, device: str) -> None:
    x, gate = wide(7, 12, torch.float32).to(device), wide(7, 12, torch.float32).to(device) * 2
    weight = rand(group if shared else 12).to(device)
    args = (x, gate, weight, 1e-5, group, gate_first, sigmoid)
    wanted = gated_rms_norm.reference(*args)
    torch.testing.assert_close(gated_rms_norm.implementation("cuda")(*args), wanted, atol=1e-5, rtol=1e-5)
    opened = gate.double().sigmoid() * (1 if sigmoid else gate.double())
    wide_x = x.double() * (opened if gate_first else 1)
    parts = wide_x.view(7, -1, group)
    truth = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().view(-1, group)).view(
        7, 12
    )
    torch.testing.assert_close(wanted.double(), truth * (1 if gate_first else opened), atol=1e-5, rtol=1e-5)
