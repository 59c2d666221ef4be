"""What stands between the two products of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F

from headway.kernels.silu_mul import GATES, gate_mul, gelu, gelu_mul, silu_mul

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""The names that config.json has for them -> ours."""


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu_tanh": _gelu_tanh,
        "gelu": gelu,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _relu2,
    }
)


@dataclass(frozen=True, slots=True)
class Gate:
    """act(gate) * up: [T, 2 I], (gate, up), -> [T, I]; ``name`` is one of ``GATES``, which products may do as well."""

    name: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, silu_mul(x) if self.name == "silu" else gelu_mul(x, self.name == "gelu_tanh"))


def opened(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """f(gate) * up of [T, I] each, f one of ``ACTIVATIONS``' values."""
    if name in GATES:
        return cast(torch.Tensor, gate_mul(gate, up, name))
    return _FUNCTIONS[name](gate) * up


def activation(name: str, *, gated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """f of one of ``ACTIVATIONS``' values: [T, I] -> [T, I]; with ``gated`` f(gate) * up: [T, 2 I], (gate, up), -> [T, I]."""
    function = _FUNCTIONS[name]
    if not gated:
        return function
    if name in GATES:
        return Gate(name)

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return multiplied
