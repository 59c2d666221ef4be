"""Granite (dense): Llama with multipliers on embeddings, attention scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class GraniteForCausalLM(DecoderModel):
    """The plain decoder with multipliers."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        fields = fields.with_defaults(max_position_embeddings=2048)
        bias = fields.flag("attention_bias")
        config = llama_like(fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
        scale = fields.number("attention_multiplier", 1.0)
        residual = fields.number("residual_multiplier", 1.0)
        divisor = fields.number("logits_scaling", 1.0)
        if not divisor:
            raise fields.refuse("logits_scaling", "divides logits: it cannot be 0")

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.mixer, scale=scale), residual_multiplier=residual)

        return replace(
            map_blocks(config, change),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            logit_multiplier=1 / divisor,
        )
