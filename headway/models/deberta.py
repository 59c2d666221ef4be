"""DeBERTa v2 and v3 (He et al. 2021): BERT's blocks, with scores that compare contents and distances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from headway.attention.disentangled import DisentangledAttention, disentangled_scale, distance_kinds
from headway.core.errors import UnsupportedModelError
from headway.models.bert import bert_like
from headway.models.encoder import EncoderConfig, EncoderModel
from headway.models.encoder_config import DENSE_HEADS
from headway.models.fields import Fields
from headway.models.heads import HeadLayer
from headway.models.interface import Target, WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.state.batch import StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceSpec:
    """How scores depend on distances.

    Attributes:
        content_to_position, position_to_content: which products there are beside that of contents.
        num_buckets, most: see ``distance_kinds``.
        normed: the table of distances is normalised.
    """

    content_to_position: bool
    position_to_content: bool
    num_buckets: int
    most: int
    normed: bool

    @property
    def kinds(self) -> int:
        """B."""
        return 2 * (self.num_buckets or self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class DebertaConfig(EncoderConfig):
    """An encoder whose scores depend on distances.

    Attributes:
        distances: None: they do not.
    """

    distances: DistanceSpec | None = None


class DebertaV2Model(EncoderModel):
    """An encoder; each layer projects the table of distances by its own matrices, once, when weights are in place."""

    def __init__(self, config: DebertaConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self._distances = config.distances
        if config.distances is None:
            return
        spec = config.distances
        empty = torch.empty(spec.kinds, config.hidden_size, dtype=dtype, device=device)
        self.table = nn.Parameter(empty, requires_grad=False)
        self.table_norm = config.norm.make(config.hidden_size, dtype=dtype, device=device) if spec.normed else None
        self._places = distance_kinds(max_model_len, spec.num_buckets, spec.most).to(device)

    @staticmethod
    def read(fields: Fields) -> DebertaConfig:
        fields = fields.with_defaults(
            hidden_act="gelu", type_vocab_size=0, layer_norm_eps=1e-7, pooler_hidden_act="gelu", position_biased_input=True,
            max_position_embeddings=512,
        )  # fmt: skip
        hidden = fields.count("hidden_size")
        if fields.get("embedding_size") not in (None, hidden):
            raise fields.refuse("embedding_size", "is not implemented unless it is hidden_size")
        pooler = fields.choice("pooler_hidden_act", {**ACTIVATIONS, "tanh": "tanh"})
        pooled = HeadLayer(name="pooler.dense", size=hidden, activation=pooler)
        heads = {**DENSE_HEADS, "classify": (pooled, HeadLayer(name="classifier", size=0))}
        # transformers counts no types where the field is 0, bert_like one; the table is then left out.
        types = fields.whole("type_vocab_size", 0)
        config = bert_like(fields.replaced(type_vocab_size=max(types, 1)), "deberta.", first_position=0, head=heads)
        names = tuple(f"attention.self.{name}_proj" for name in ("query", "key", "value"))
        block = config.blocks[0]
        block = replace(block, mixer=replace(block.mixer, names=(names, "attention.output.dense")))
        embedding = replace(
            config.embedding, num_token_types=types, token_type="" if not types else "embeddings.token_type_embeddings"
        )
        if not fields.flag("position_biased_input"):
            embedding = replace(embedding, position="", num_positions=0)
        own = {name: getattr(config, name) for name in EncoderConfig.__dataclass_fields__}
        own |= {"blocks": (block,) * len(config.blocks), "embedding": embedding}
        return DebertaConfig(**own, distances=_distances(fields))

    def forward_attention(self, layer: int, qkv: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See ``EncoderModel``."""
        return self._attend(qkv, batch, *self._projected[layer], self._places)

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; before ``finalize``."""
        found = super().weights()
        found = replace(
            found, unused=(*found.unused, "encoder.LayerNorm.", "lm_predictions.")
        )  # nothing here reads them
        if self._distances is None:
            return found
        targets = {**found.targets, "encoder.rel_embeddings.weight": Target(self.table)}
        if self.table_norm is not None:
            targets |= self.table_norm.destinations("encoder.LayerNorm.")
        return replace(found, targets=targets)

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place."""
        if self._distances is not None:
            self._project(self._distances)
        super().finalize()

    def _project(self, spec: DistanceSpec) -> None:
        """Keys and queries of the kinds of distances, for each layer [B, H * D] or None."""
        table = self.table if self.table_norm is None else self.table_norm.forward(self.table)
        self._projected: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        for block in self._layers:
            rows = block.spec.mixer.num_heads * block.spec.mixer.head_dim
            queries, keys, _ = block.mixer.qkv.forward(table).split(rows, dim=1)
            keys_of = keys.contiguous() if spec.content_to_position else None
            self._projected.append((keys_of, queries.contiguous() if spec.position_to_content else None))
        mixer = self._layers[0].spec.mixer
        kinds = 1 + spec.content_to_position + spec.position_to_content
        scale = disentangled_scale(mixer.head_dim, kinds)
        self._attend = DisentangledAttention(num_heads=mixer.num_heads, scale=scale)
        for number, block in enumerate(self._layers):
            block.attend_otherwise = lambda qkv, batch, layer=number: self.forward_attention(layer, qkv, batch)


def _distances(fields: Fields) -> DistanceSpec | None:
    given = fields.get("pos_att_type") or []
    if not fields.flag("relative_attention"):
        if given:
            raise fields.refuse("pos_att_type", "is not implemented without relative_attention")
        return None
    kinds = [kind.strip() for kind in given.lower().split("|")] if isinstance(given, str) else list(given)
    if not {*kinds} <= {"c2p", "p2c"}:
        raise fields.refuse("pos_att_type", "is not implemented; c2p and p2c are")
    if kinds and not fields.flag("share_att_key"):
        raise UnsupportedModelError("config.json: share_att_key = false is not implemented; true is")
    norms = [name.strip() for name in str(fields.get("norm_rel_ebd") or "none").lower().split("|")]
    most = int(fields.number("max_relative_positions", -1))
    buckets = int(fields.number("position_buckets", -1))
    return DistanceSpec(
        content_to_position="c2p" in kinds,
        position_to_content="p2c" in kinds,
        num_buckets=max(buckets, 0),
        most=most if most >= 1 else fields.count("max_position_embeddings"),
        normed="layer_norm" in norms,
    )
