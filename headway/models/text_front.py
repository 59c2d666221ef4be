"""Token ids to the first hidden states of an encoder that reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from headway.kernels.embed import embed
from headway.models.encoder_decoder import EncoderDecoderModel, Front, Positions
from headway.models.interface import EncoderInput, EncoderSpec, Target
from headway.models.layers.mixer import parameter
from headway.models.layers.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFront:
    """The decoder's embedding, and what is added to it.

    Attributes:
        longest: most tokens of a text.
        multiplier: of the embeddings.
        positions: learned ones; None: there are none.
        norm, norm_name: of the sum; "" for none.
    """

    longest: int
    multiplier: float = 1.0
    positions: Positions | None = None
    norm: NormSpec
    norm_name: str = ""
    shares_embedding: ClassVar[bool] = True

    @property
    def takes(self) -> EncoderSpec:
        """Token ids."""
        return EncoderSpec(kind="text", longest=self.longest, words_per_row=1)

    def make(self, model: EncoderDecoderModel, *, dtype: torch.dtype, device: torch.device) -> Front:
        """See ``FrontSpec``."""
        return TextEmbedding(self, model, dtype=dtype, device=device)


class TextEmbedding(nn.Module):
    """norm(multiplier * embedding + position)."""

    def __init__(
        self, spec: TextFront, model: EncoderDecoderModel, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, hidden = spec, model.config.hidden_size
        self._shared = [model.embedding]  # in a list: it is the model's, and no part of this module
        rows = 0 if spec.positions is None else spec.positions.rows
        self.positions = parameter(rows, hidden, dtype=dtype, device=device) if rows else None
        made = spec.norm.make(hidden, dtype=dtype, device=device) if spec.norm_name else None
        self.norm: Norm | None = made

    def forward(self, inputs: Sequence[EncoderInput], starts: torch.Tensor) -> torch.Tensor:
        """[N, E]; see ``Front``."""
        x = self._shared[0].forward(torch.cat([each.data for each in inputs]))
        if self.spec.multiplier != 1.0:
            x *= self.spec.multiplier
        if self.positions is not None:
            assert self.spec.positions is not None
            token = torch.arange(len(x), dtype=torch.int32, device=x.device)
            row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(inputs) - 1)
            place = token - starts.index_select(0, row)
            x += embed(place + self.spec.positions.first, self.positions)
        return x if self.norm is None else self.norm.forward(x)

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        found: dict[str, Target] = {}
        if self.positions is not None and self.spec.positions is not None:
            found[f"{self.spec.positions.name}.weight"] = Target(self.positions)
        return found if self.norm is None else found | self.norm.destinations(f"{self.spec.norm_name}.")
