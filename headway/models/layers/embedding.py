"""Token embedding."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from headway.kernels.embed import embed
from headway.kernels.linear import PackedLinear
from headway.kernels.quant_linear import QuantizedLinear
from headway.models.interface import Target
from headway.parallel.shard import VocabularyPart


class Embedding(nn.Module):
    """Rows of a table by token id.

    Args:
        padding: rows of zeros behind those of tokens, for the output layer that is tied to it.

    Attributes:
        weight: [V + padding, C]; gone once a tied output layer has packed it, or when blocks are kept.
        rows: V.
        blocks: the table in its GGUF blocks, or None.
    """

    def __init__(
        self, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device, padding: int = 0
    ) -> None:
        super().__init__()
        weight = torch.empty(vocab_size + padding, size, dtype=dtype, device=device)
        self.weight, self.rows = nn.Parameter(weight, requires_grad=False), vocab_size
        if padding:
            weight[vocab_size:].zero_()
        self.panels: torch.Tensor | None = None
        self.blocks: QuantizedLinear | None = None
        self.dtype = dtype

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """int32 [T], each in [0, V) -> a fresh [T, C], times ``scale``, which the caller may overwrite."""
        panels, blocks = self.panels, self.blocks
        if panels is None and blocks is None:
            return cast(torch.Tensor, embed(ids, self.weight, scale))
        if blocks is not None:
            rows = blocks.rows(ids, self.dtype)
        else:  # panels may be in bfloat16 beside activations in float32
            rows = panel_rows(cast(torch.Tensor, panels), ids).to(self.dtype)
        return rows if scale == 1.0 else rows.mul_(scale)

    def destinations(self, prefix: str) -> dict[str, Target]:
        return {f"{prefix}weight": Target(self.weight[: self.rows])}

    def share(self, packed: PackedLinear | QuantizedLinear | None) -> None:
        """Read rows from the tied output layer's packed weight from now on, so that memory holds the table once."""
        if isinstance(packed, PackedLinear) and packed.packed is not None:
            self.panels = packed.packed
            del self.weight

    def keep_blocks(self, packed: QuantizedLinear) -> None:
        """Called once, while loading: read rows from the table in its GGUF blocks instead of ``weight``."""
        self.blocks = packed
        del self.weight


class ShardedEmbedding(Embedding):
    """The rows of a part of the vocabulary; other ranks have the others, and what all of them read is added up.

    Rows beyond the vocabulary, which make all parts equally large, are zeros.
    """

    def __init__(self, part: VocabularyPart, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(part.rows, size, dtype=dtype, device=device)
        self.part = part
        with torch.no_grad():
            self.weight[part.own :].zero_()

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """As ``Embedding``."""
        own = ids - self.part.first
        others = (own < 0) | (own >= self.part.own)
        rows = super().forward(own.clamp_(0, self.part.rows - 1), scale)
        return self.part.group.all_reduce(rows.masked_fill_(others[:, None], 0.0))

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Embedding``."""
        return {f"{prefix}weight": Target(self.weight[: self.part.own], *self.part.taken)}


def panel_rows(panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows ids [T] of the [N, K] matrix in ``linear_packed``'s layout [ceil(N / 32), K, 32]: [T, K].

    A row's elements lie a cache line apart. The output layer, which reads all rows each step, decides the layout.
    """
    count, inputs, width = panels.shape
    unit = 2 if panels.dtype is torch.bfloat16 else 1  # inputs kept together
    rows = panels.view(count, inputs // unit, width, unit)[ids // width, :, ids % width]  # [T, K / unit, unit]
    return rows.flatten(1)
