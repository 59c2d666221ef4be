"""Mistral and Ministral: Llama whose layers see a sliding window, all of them unless layer_types says otherwise."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import SLIDING, layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class MistralForCausalLM(DecoderModel):
    """The plain decoder with a sliding window."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
        sliding = fields.get("sliding_window") is not None
        kinds = (SLIDING,) * fields.count("num_hidden_layers") if sliding else ()
        bias = fields.flag("attention_bias")
        return llama_like(fields, attention_bias=bias, windows=layer_windows(fields, otherwise=kinds))


class MinistralForCausalLM(MistralForCausalLM):
    """The same, by the name under which newer exporters write models that mix sliding and full layers."""


class Ministral3ForCausalLM(DecoderModel):
    """Ministral 3: queries grow by the original contexts that stand before them, as Llama 4's do where nothing rotates."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1},
        )  # fmt: skip
        rope = Fields(fields.get("rope_scaling") or fields["rope_parameters"] or {})
        grows = (float(rope.count("original_max_position_embeddings")), rope.number("llama_4_scaling_beta"), 0.0)
        own = {name: rope[name] for name in rope if name not in ("llama_4_scaling_beta", "max_position_embeddings")}
        fields = fields.replaced(rope_parameters=own, rope_scaling=None)
        slides = fields.get("sliding_window") is not None
        kinds = (SLIDING,) * fields.count("num_hidden_layers") if slides else ()
        config = llama_like(fields, windows=layer_windows(fields.replaced(layer_types=None), otherwise=kinds))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.attention, temperature=grows))

        return map_blocks(config, change)
