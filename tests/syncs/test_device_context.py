"""``with torch.device(...)`` under the simulation, whatever was asked of torch before it."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _device

from headway import syncs
from headway.syncs.simulate import SimulationProbe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")


def test_it_reaches_every_constructor_inside_and_behind() -> None:
    """torch remembers the constructors when a context is first entered, which may be inside."""
    _device._device_constructors.cache_clear()
    with syncs.record(probes=(SimulationProbe(),)), torch.device("meta"):
        assert torch.tensor([1.0]).is_meta and torch.as_tensor([1.0]).is_meta and torch.empty(1).is_meta
        assert torch.get_default_device() == torch.device("meta")
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
