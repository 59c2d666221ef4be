"""``MediaEmbedder``: what stands in place of a medium's tokens, whether a tower made it or they are words of its vocabulary.

Gemma 3n gives each medium some ids of its own. A table has a vector of the medium's width for each, which passes the same
product as the tower's rows do, behind a norm of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from headway.kernels.rms_norm import rms_norm
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import parameter
from headway.models.layers.norm import RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedderSpec:
    """One medium's.

    Attributes:
        prefix: in the checkpoint.
        first, count: ids of its vocabulary.
        inner: width of the tower's rows, and of the table.
        width: of a row of the decoder.
        eps: of its norms.
    """

    prefix: str
    first: int
    count: int
    inner: int
    width: int
    eps: float


class MediaEmbedder(nn.Module):
    """See the module.

    Attributes:
        table: [count, width], what stands in place of each of the medium's words; from ``finalize`` on.
    """

    def __init__(self, spec: EmbedderSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.words = parameter(spec.count, spec.inner, dtype=dtype, device=device)
        self.of_rows, self.of_words = (RMSNorm(spec.inner, spec.eps, dtype=dtype, device=device) for _ in range(2))
        parts = {"embedding_projection": spec.width}
        self.project = Linear(spec.inner, parts, bias=False, dtype=dtype, device=device)
        self.ones = torch.ones(spec.width, dtype=dtype, device=device)
        self.table = torch.zeros(spec.count, spec.width, dtype=dtype, device=device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """A tower's rows [N, inner] -> [N, width]."""
        return self._projected(self.of_rows.forward(rows))

    def place(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, width] with the rows replaced whose ids, int32 [T], are words of the medium."""
        own = ids - self.spec.first
        looked = self.table.index_select(0, own.clamp(0, self.spec.count - 1))
        return torch.where(((own >= 0) & (own < self.spec.count))[:, None], looked, x)

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, rms_norm(self.project.forward(x), self.ones, self.spec.eps))

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        prefix = self.spec.prefix
        found = {f"{prefix}embedding.weight": Target(self.words)} | self.project.destinations(prefix)
        found |= self.of_rows.destinations(f"{prefix}soft_embedding_norm.")
        return found | self.of_words.destinations(f"{prefix}hard_embedding_norm.")

    def finalize(self) -> None:
        """Called once, when the weights are in place and products are packed."""
        self.table.copy_(self._projected(self.of_words.forward(self.words)))
        del self.words
