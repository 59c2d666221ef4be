"""Devices are chosen by name, and a missing one is an error that says what to do."""

from __future__ import annotations

import pytest
import torch

from headway.core.errors import ConfigError
from headway.device.select import select_device


def test_cpu_by_name() -> None:
    device = select_device("cpu")
    assert device.torch_device.type == "cpu" and not device.asynchronous


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_auto_without_cuda_is_the_cpu_and_cuda_is_refused() -> None:
    assert select_device("auto").torch_device.type == "cpu"
    with pytest.raises(ConfigError, match="device='cpu'"):
        select_device("cuda")
