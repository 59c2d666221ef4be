"""Llama 1 to 3.x and the many models that reuse its architecture (SmolLM2, TinyLlama, Yi, DeepSeek-Coder, Falcon3, ...)."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class LlamaForCausalLM(DecoderModel):
    """The plain decoder."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=2048)
        bias = fields.flag("attention_bias")
        return llama_like(fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"), windows=layer_windows(fields))


class SeedOssForCausalLM(DecoderModel):
    """Seed-OSS: the plain decoder, with biases that the way into attention and the way out have each for itself."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True
        )
        return llama_like(
            fields,
            attention_bias=fields.flag("attention_bias"),
            out_bias=fields.flag("attention_out_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )


class ArceeForCausalLM(DecoderModel):
    """AFM: the plain decoder whose feed-forward block has no gate."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="relu2")
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, ffn=replace(block.mlp, gated=False, names=(("up_proj",), "down_proj")))

        return map_blocks(config, change)
