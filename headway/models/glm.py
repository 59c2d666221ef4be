"""GLM-4 (the dense 9B and 32B models, old and new): part of a head rotated, in interleaved pairs; gate and up in one tensor;
the newer ones have norms before and behind both parts."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.rope import read_rope


def _glm(fields: Fields, names: BlockNames) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=131072, rms_norm_eps=1.5625e-7, num_key_value_heads=2, head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338],
    )  # fmt: skip
    sizes = read_sizes(fields)
    rope = replace(read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position), interleaved=True)
    config = llama_like(fields, qkv_bias=fields.flag("attention_bias"), names=names, rope=rope)

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        return replace(block, ffn=replace(block.mlp, names=(("gate_up_proj",), "down_proj")))

    return map_blocks(config, change)


class GlmForCausalLM(DecoderModel):
    """GLM-4-9B of 2024."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        return _glm(fields, BlockNames())


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414, GLM-Z1."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        names = BlockNames(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")
        return _glm(fields, names)
