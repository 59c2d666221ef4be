"""Token embedding: rows of a table.

embed(ids, weight, scale) -> out
    ids     int32 [T]; an id outside [0, V) reads the nearest row
    weight  [V, C], rows contiguous
    out     [T, C], fresh: those rows times scale, rounded

Lets the kernel after it start only behind its own wait: those that start early (``triton_early``) rely on one such kernel
before them.
"""

from __future__ import annotations

import torch

from headway.kernels.embed import reference
from headway.kernels.registry import Op


def _embed_meta(ids: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


embed = Op(
    "embed(Tensor ids, Tensor weight, float scale=1.0) -> Tensor",
    reference=reference.embed,
    meta=_embed_meta,
    triton="headway.kernels.embed.triton:embed",
)
