"""Which device to run on."""

from __future__ import annotations

import torch

from headway.core.errors import ConfigError
from headway.device.base import Device
from headway.device.cpu import CpuDevice
from headway.device.cuda import CudaDevice


def select_device(name: str) -> Device:
    """The device that ``name`` ("auto", "cpu", "cuda", "cuda:N", "sim", "sim:SEED") stands for.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    kind, _, number = name.partition(":")
    if kind == "sim":
        from headway.device.sim import SimDevice  # late: for tests, nobody else pays for it

        simulated = SimDevice(int(number or 0))
        simulated.enter()
        return simulated
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}, but torch sees no CUDA GPU; use device='cpu' or install a CUDA build of torch"
        )
    torch_device = torch.device("cuda" if name == "auto" else name)
    if (torch_device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}, but there are only {torch.cuda.device_count()} GPUs")
    return CudaDevice(torch_device)
