"""Per-layer inputs (Gemma 3n and 4): a small vector of each token for every layer, from a table of its own and the embedding.

Shapes: T tokens of the step, C hidden size, L layers, P size of a layer's input, VP rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from headway.models.interface import Target
from headway.models.layers.activation import opened
from headway.models.layers.embedding import Embedding
from headway.models.layers.forms import InProduct, LayerForms, OutProduct
from headway.models.layers.junction import ProjectIn, ProjectOut, Stream
from headway.models.layers.linear import Linear
from headway.models.layers.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerSpec:
    """The inputs of all layers.

    Attributes:
        size: P.
        layers: L.
        vocab_size: VP; tokens beyond it are read as token 0.
    """

    size: int
    layers: int
    vocab_size: int


class PerLayerInputs(nn.Module):
    """(norm(projection(x) / sqrt(C)) + table[token] * sqrt(P)) / sqrt(2)."""

    def __init__(
        self, spec: PerLayerSpec, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        width = spec.layers * spec.size
        self.table = Embedding(spec.vocab_size, width, dtype=dtype, device=device)
        self.project = Linear(hidden, {"per_layer_model_projection": width}, bias=False, dtype=dtype, device=device)
        self.norm = norm.make(spec.size, dtype=dtype, device=device)
        self._shrink = float(torch.tensor(hidden**-0.5, dtype=dtype))
        self._scale = float(torch.tensor(spec.size**0.5, dtype=dtype))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings x [T, C], which are kept, of tokens ids int32 [T] -> [T, L, P]."""
        spec = self.spec
        projected = self.project.forward(x) * self._shrink
        projected = self.norm.forward(projected.view(-1, spec.size)).view(len(x), spec.layers, spec.size)
        known = torch.where(ids < spec.vocab_size, ids, 0)
        looked = self.table.forward(known).mul_(self._scale).view_as(projected)
        return looked.add_(projected).mul_(2.0**-0.5)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.table.destinations(f"{prefix}embed_tokens_per_layer.") | self.project.destinations(prefix)
        return found | self.norm.destinations(f"{prefix}per_layer_projection_norm.")


class PerLayerGate(nn.Module):
    """norm(out(act(into(x)) * input of the layer)).

    Once it is linked, ``add`` adds that to a residual, in the forms that suit the number of tokens.
    """

    def __init__(
        self, size: int, act: str, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.into = Linear(hidden, {"per_layer_input_gate": size}, bias=False, dtype=dtype, device=device)
        self.out = Linear(size, {"per_layer_projection": hidden}, bias=False, dtype=dtype, device=device)
        self.norm: Norm = norm.make(hidden, dtype=dtype, device=device)
        self.act = act

    def forward(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """x [T, C] and the layer's input own [T, P] -> [T, C], fresh."""
        return self.norm.forward(self.out.forward(opened(self.act, self.into.forward(x), own)))

    def link(self, next_norm: Norm | None, scale: torch.Tensor) -> None:
        """Make the junctions of ``add``; ``next_norm`` as of ``Block.link``, ``scale`` [1]: of the sum."""
        self.project_in = ProjectIn(None, self.into)
        self.project_out = ProjectOut(self.out, next_norm, self.norm, scale=scale)

    @property
    def products(self) -> tuple[InProduct | None, OutProduct | None]:
        """What decides on the forms."""
        return self.project_in.product(), self.project_out.product()

    def add(self, stream: Stream, own: torch.Tensor, forms: LayerForms) -> Stream:
        """The stream of T tokens with (residual + forward(residual, own)) * scale; own is [T, P]."""
        gated = opened(self.act, self.project_in(stream, forms.into_side), own)
        return self.project_out(gated, stream, forms.out_of_side)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.into.destinations(prefix) | self.out.destinations(prefix)
        return found | self.norm.destinations(f"{prefix}post_per_layer_input_norm.")
