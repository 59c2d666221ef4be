"""Self-attention: projections around ``PagedAttention``."""

from __future__ import annotations

import torch
from torch import nn

from headway.attention.paged import PagedAttention
from headway.models.config import DecoderConfig
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.state.batch import StepBatch


class Attention(nn.Module):
    """One layer's attention, query, key and value projections in one matrix.

    Args:
        layer: index, for the layer's sliding window.
        cos_sin: float32 [L, Drot], shared by all layers.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, cos_sin: torch.Tensor, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * size, config.num_kv_heads * size
        parts = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv = Linear(hidden, parts, bias=config.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(q_rows, {"o_proj": hidden}, bias=config.o_bias, dtype=dtype, device=device)
        self.eps = config.rms_norm_eps
        self.q_norm = RMSNorm(size, self.eps, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = RMSNorm(size, self.eps, dtype=dtype, device=device) if config.qk_norm else None
        self.cos_sin = cos_sin
        self.attend = PagedAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=size,
            scale=size**-0.5,
            window=config.windows[layer] if config.windows else 0,
        )

    def forward(self, x: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]; caches [NB, bs, KH, D] of this layer are written."""
        return self.out.forward(self.heads(self.qkv.forward(x), batch, k_cache, v_cache))

    def heads(self, qkv: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """What lies between the projections: [T, (H + 2 KH) * D] -> [T, H * D]."""
        return self.attend(qkv, batch, k_cache, v_cache, *self._turning())

    def queries(
        self, qkv: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """The part before the scores: [T, (H + 2 KH) * D] -> q [T, H, D]; keys and values are in the cache then."""
        return self.attend.queries(qkv, batch, k_cache, v_cache, *self._turning())

    def _turning(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]:
        q_norm, k_norm = self.q_norm, self.k_norm
        norms = (None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight)
        return self.cos_sin, *norms, self.eps

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name, beginning with prefix -> the view of ours it fills."""
        found = self.qkv.destinations(prefix) | self.out.destinations(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        return found
