"""What the rules for linear layers ask of a GPU. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

BANDWIDTHS: Mapping[str, float] = MappingProxyType(
    {"GH200": 3.7e6, "H200": 4.44e6, "H100 PCIe": 1.9e6, "H100": 3.05e6, "H20": 3.7e6, "H800": 3.05e6}
)
"""Part of a card's name -> bytes a microsecond that a plain reduction reads: measured for the H200, for others 0.92 of the data
sheet's. The first name that is found counts."""
OTHER_BANDWIDTH = 2e6
"""Of cards that are not listed. Only ratios to what an SM takes in depend on it."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        name: as its driver gives it.
        capability: compute capability.
        sms: SMs (streaming multiprocessors).
        bandwidth: bytes a microsecond from memory.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    bandwidth: float


H200 = Card("NVIDIA H200", (9, 0), 132, BANDWIDTHS["H200"])
"""Stands for the card where there is none: shapes of references and of Meta tensors follow from it."""


@lru_cache(maxsize=16)
def card_of(device: torch.device) -> Card:
    """The card of a CUDA device; the H200 for others."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    bandwidth = next((rate for name, rate in BANDWIDTHS.items() if name in found.name), OTHER_BANDWIDTH)
    return Card(found.name, (found.major, found.minor), found.multi_processor_count, bandwidth)
