"""The gated feed-forward block."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from headway.kernels.silu_mul import silu_mul
from headway.models.config import DecoderConfig
from headway.models.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), gate and up in one matrix."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, {"down_proj": hidden}, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.down.forward(cast(torch.Tensor, silu_mul(self.gate_up.forward(x))))

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name, beginning with prefix -> the view of ours it fills."""
        return self.gate_up.destinations(prefix) | self.down.destinations(prefix)
