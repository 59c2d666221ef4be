"""Gemma 4 (text): heads of full layers larger than those of sliding ones, normalised values, upper layers that share lower
layers' keys and values, per-layer inputs, and a scalar on each layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from headway.core.errors import UnsupportedModelError
from headway.models.blocks import Block, BlockSpec
from headway.models.config import FULL, SLIDING, layer_kinds, layer_windows, llama_like, map_blocks, read_ropes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.gemma import SANDWICH
from headway.models.gemma4_blocks import MixtureBlockSpec, PerLayerBlockSpec, read_routed
from headway.models.interface import WeightMap
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.forms import LayerForms
from headway.models.layers.junction import Stream
from headway.models.layers.per_layer import PerLayerInputs, PerLayerSpec
from headway.state.batch import StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerConfig(DecoderConfig):
    """A decoder with per-layer inputs.

    Attributes:
        per_layer: what they are; None: there are none.
    """

    per_layer: PerLayerSpec | None = None

    @property
    def embeds_everywhere(self) -> bool:
        """See ``DecoderConfig``: inputs by layer are made from embeddings."""
        return self.per_layer is not None

    @classmethod
    def of(cls, config: DecoderConfig, **more: Any) -> Self:
        """``config`` with more."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(config)} | more)


class Gemma4ForCausalLM(DecoderModel):
    """Dense ones, and those whose layers have a mixture beside the dense part (``gemma4_blocks``)."""

    knows_stages: ClassVar[tuple[str, ...]] = ("_enter",)

    def __init__(self, config: PerLayerConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.per_layer = None
        if config.per_layer is not None:
            self.per_layer = PerLayerInputs(
                config.per_layer, config.norm, config.hidden_size, dtype=dtype, device=device
            )

    def _enter(self, x: torch.Tensor, batch: StepBatch, block: Block, forms: LayerForms) -> Stream:
        if self.per_layer is None:
            return Stream(x)
        return Stream(x, beside=self.per_layer.forward(self._embedded_here(x, batch), batch.input_ids))

    def weights(self) -> WeightMap:
        """See ``DecoderModel``."""
        found = super().weights()
        own = {} if self.per_layer is None else self.per_layer.destinations("model.")
        return replace(found, targets={**found.targets, **own}, computed=(*found.computed, *unused_names(self.config)))

    @staticmethod
    def read(fields: Fields) -> PerLayerConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, head_dim=256,
            max_position_embeddings=131072, sliding_window=512, sliding_window_pattern=6, num_kv_shared_layers=0,
            hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, global_head_dim=512, num_key_value_heads=4,
        )  # fmt: skip
        if fields.flag("attention_bias"):
            raise fields.refuse("attention_bias", "is not implemented")
        gelu = fields.choice("hidden_activation", ACTIVATIONS)
        kinds = layer_kinds(fields, fields.count("sliding_window_pattern"))
        kinds = (*kinds[:-1], FULL)
        windows = layer_windows(fields.replaced(layer_types=kinds))
        ropes = read_ropes(fields, full_theta=1e6, sliding_theta=1e4)
        config = llama_like(fields, windows=windows, names=SANDWICH, qk_norm="head", rope=ropes[SLIDING])
        sources, first = shared_layers(fields, kinds)
        side = fields.whole("hidden_size_per_layer_input", 0)
        fields.get("num_experts")  # honoured: without the block there are none
        mixture = read_routed(fields, gelu) if fields.flag("enable_moe_block") else None

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            source, wide = sources[layer], fields.flag("use_double_wide_mlp") and layer >= first
            mixer = _attention(fields, block.attention, layer, kinds[layer] == FULL)
            if source is not None:
                mixer = replace(mixer, shared_with=source, names=(("q_proj",), "o_proj"), keys_are_values=False)
            mlp = replace(block.mlp, activation=gelu, size=block.mlp.size * (2 if wide else 1))
            own: dict[str, Any] = {"mixer": mixer, "ffn": mlp, "names": block.names}
            own |= {"layer": layer, "side": side, "side_act": gelu}
            return PerLayerBlockSpec(**own) if mixture is None else MixtureBlockSpec(**own, mixture=mixture)

        config = replace(
            map_blocks(config, change),
            embedding_multiplier=config.hidden_size**0.5,
            round_multiplier=True,
            logit_soft_cap=fields.number("final_logit_softcapping", 0.0, least=0),
            narrow_from=narrow_layer(first, len(kinds)),
        )
        size = len(kinds), fields.count("vocab_size_per_layer_input") if side else 0
        spec = PerLayerSpec(size=side, layers=size[0], vocab_size=size[1]) if side else None
        return PerLayerConfig.of(config, per_layer=spec)


def _attention(fields: Fields, spec: AttentionSpec, layer: int, full: bool) -> AttentionSpec:
    """Full layers have heads of their own; newer exporters write them layer by layer."""
    spec = replace(spec, scale=1.0, v_norm=True)
    own = fields.get("per_layer_config")
    same = full and fields.flag("attention_k_eq_v")
    if own is None:
        size = fields.count("global_head_dim") if full else spec.head_dim
        heads = fields.get("num_global_key_value_heads") if same else None
    else:
        mine = Fields(own.get(str(layer), {}), {"head_dim": spec.head_dim})
        size, heads = mine.count("head_dim"), mine.get("num_key_value_heads")
        if set(mine) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(f"config.json: per_layer_config of layer {layer} has {', '.join(mine)}")
    heads = spec.num_kv_heads if heads is None else heads
    sizes = fields.replaced(num_key_value_heads=heads, head_dim=size)
    ropes = read_ropes(sizes, full_theta=1e6, sliding_theta=1e4)
    names = (("q_proj", "k_proj"), "o_proj") if same else spec.names
    return replace(
        spec,
        head_dim=size,
        num_kv_heads=heads,
        rope=ropes[FULL if full else SLIDING],
        keys_are_values=same,
        names=names,
    )


def shared_layers(fields: Fields, kinds: tuple[str, ...]) -> tuple[tuple[int | None, ...], int]:
    """(per layer the one whose keys and values it reads, None for its own; the first layer that has none of its own).

    The last ``num_kv_shared_layers`` layers read those of the last layer of their kind below them.

    Raises:
        UnsupportedModelError: there is no such layer.
    """
    first = len(kinds) - fields.whole("num_kv_shared_layers", 0)
    below = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if first < len(kinds) and not set(kinds[max(first, 0) :]) <= set(below):
        raise fields.refuse("num_kv_shared_layers", "leaves no layer below whose keys a shared layer could read")
    return tuple(below[kind] if layer >= first else None for layer, kind in enumerate(kinds)), first


def narrow_layer(first_shared: int, layers: int) -> int:
    """The last layer that caches: from its scores on the rows' last tokens are all that is needed."""
    return min(first_shared, layers) - 1


def unused_names(config: DecoderConfig) -> tuple[str, ...]:
    """Endings of tensors that some exporters write for layers that share keys and values."""
    shared = [
        i for i, block in enumerate(config.blocks) if block.cache is not None and block.cache.shared_with is not None
    ]
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")
    return tuple(f"layers.{i}.self_attn.{part}" for i in shared for part in parts)
