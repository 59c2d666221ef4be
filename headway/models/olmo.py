"""OLMo 2 and 3: norms behind attention and feed-forward block only, and over all heads of queries and keys; 3 has sliding
layers, whose rotation is not stretched."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import FULL, SLIDING, layer_kinds, layer_windows, llama_like, map_blocks, read_ropes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields

NORMS_AFTER = BlockNames(
    before_mixer="", after_mixer="post_attention_layernorm", before_ffn="", after_ffn="post_feedforward_layernorm"
)


class Olmo2ForCausalLM(DecoderModel):
    """Full attention throughout."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        fields = fields.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
        bias = fields.flag("attention_bias")
        return llama_like(fields, qkv_bias=bias, out_bias=bias, qk_norm="all", names=NORMS_AFTER)


class Olmo3ForCausalLM(DecoderModel):
    """Three of four layers slide."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        fields = fields.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
        bias, ropes = fields.flag("attention_bias"), read_ropes(fields, full_theta=5e5, sliding_theta=5e5)
        windows = layer_windows(fields, otherwise=layer_kinds(fields, 4))
        config = llama_like(
            fields, qkv_bias=bias, out_bias=bias, qk_norm="all", names=NORMS_AFTER, windows=windows, rope=ropes[FULL]
        )

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(block, mixer=replace(block.mixer, rope=ropes[SLIDING if block.mixer.window else FULL]))

        return map_blocks(config, change)
