"""Ranges and rounding, as quantisers have them. The first word is the label."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def range_observed_for_quantisation(device: str) -> Iterator[None]:
    """Runs on: running minima and maxima."""
    least, most, x = torch.zeros((), device=device), torch.zeros((), device=device), torch.randn(8, device=device)
    yield
    low, high = torch.aminmax(x)
    least.copy_(torch.minimum(least, low))
    most.copy_(torch.maximum(most, high))


def channels_quantised_for_training(device: str) -> Iterator[None]:
    """Waits: the zero points of all channels are checked on the host."""
    x, scale = torch.randn(3, 4, device=device), torch.full((3,), 0.1, device=device)
    zero = torch.zeros(3, dtype=torch.int32, device=device)
    yield
    torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -128, 127)


def tensor_quantised_for_training(device: str) -> Iterator[None]:
    """Runs on: scale and zero point are numbers of the host."""
    x = torch.randn(3, 4, device=device, requires_grad=True)
    yield
    torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum().backward()
