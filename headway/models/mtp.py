"""Multi-token prediction: the layer behind a model's last one that drafts tokens, as its checkpoint has it.

From the hidden state of a token and the token behind it the layer makes a hidden state that stands for the latter (DeepSeek-V3,
arXiv 2412.19437, section 2.2):

    h' = block(projection(norm_e(embedding(token behind)) | norm_h(h)))

The model's output layer reads norm(h'), and so does the next pass. Families differ in names alone; ``speculative.mtp_model`` is
the module, which is built and loaded only where somebody asks for drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.models.fields import Fields

if TYPE_CHECKING:
    from headway.models.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPSpec:
    """The layer. Names are those of modules, with all that stands before them.

    Attributes:
        block: of the decoder block; "": its parts are named as if there were none.
        token_norm, hidden_norm, projection, norm: of the parts around it.
        like: the model's layer that the block is like, in numbers and in the names of its parts.
        layers: how many of them the checkpoint has; the first one drafts.
        hidden_first: the projection reads norm_h(h) | norm_e(embedding).
        shared: of tensors that repeat the model's embedding and output layer, which the layer shares.
    """

    block: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    like: int = -1
    layers: int = 1
    hidden_first: bool = False
    shared: tuple[str, ...] = ()


def next_layers(fields: Fields) -> int:
    """How many layers for further tokens a config.json says there are.

    Raises:
        UnsupportedModelError: no number.
    """
    return max(int(fields.number(name, 0, least=0)) for name in ("num_nextn_predict_layers", "num_mtp_layers"))


def behind_last(config: DecoderConfig, number: int) -> DecoderConfig:
    """``config`` of a checkpoint in DeepSeek's format, with ``number`` such layers numbered on behind the model's own; GLM's
    mixtures have it, too. The first of them drafts. The model itself leaves all of them out."""
    if not number:
        return config
    layers = len(config.blocks)
    own = f"{config.names.layers}.{layers}"
    spec = MTPSpec(
        block=own,
        token_norm=f"{own}.enorm",
        hidden_norm=f"{own}.hnorm",
        projection=f"{own}.eh_proj",
        norm=f"{own}.shared_head.norm",
        layers=number,
        shared=(f"{own}.embed_tokens.", f"{own}.shared_head.head."),
    )
    behind = tuple(f"layers.{layer}." for layer in range(layers, layers + number))
    return replace(config, unused=(*config.unused, *behind), mtp=spec)
