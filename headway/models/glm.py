"""GLM-4 (the dense 9B and 32B models, old and new): part of a head rotated, in interleaved pairs; gate and up in one tensor;
the newer ones have norms before and behind both parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.mixtures import corrected_router, expert_count, read_mixture, with_mixture
from headway.models.mtp import behind_last, next_layers
from headway.models.rope import read_rope


def _glm(fields: Fields, names: BlockNames) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=131072, rms_norm_eps=1.5625e-7, num_key_value_heads=2, head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338],
    )  # fmt: skip
    sizes = read_sizes(fields)
    rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, partial=True)
    rope = replace(rope, interleaved=True)
    config = llama_like(fields, attention_bias=fields.flag("attention_bias"), out_bias=False, names=names, rope=rope)

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        return replace(block, ffn=replace(block.mlp, names=(("gate_up_proj",), "down_proj")))

    return map_blocks(config, change)


class GlmForCausalLM(DecoderModel):
    """GLM-4-9B of 2024."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        return _glm(fields, BlockNames())


class Glm4MoeForCausalLM(DecoderModel):
    """GLM-4.5 and 4.6: the first layers are dense, the others mixtures chosen by corrected sigmoids."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=131072, rms_norm_eps=1e-5, num_key_value_heads=8, partial_rotary_factor=0.5,
            n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, n_group=1,
            topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1,
        )  # fmt: skip
        experts = expert_count(fields, "n_routed_experts", "num_local_experts", "num_experts")
        norm: Literal["", "head"] = "head" if fields.flag("use_qk_norm") else ""
        config = llama_like(
            fields, attention_bias=fields.flag("attention_bias"), out_bias=False, qk_norm=norm, partial=True
        )
        first, layers = fields.whole("first_k_dense_replace"), len(config.blocks)
        shared = fields.whole("n_shared_experts", 0) * fields.count("moe_intermediate_size")
        mixture = read_mixture(fields, experts, corrected_router(fields), shared=shared)
        config = behind_last(config, next_layers(fields.with_defaults(num_nextn_predict_layers=1)))
        return with_mixture(config, range(first, layers), replace(mixture, shared_name="shared_experts"))


class SolarOpenForCausalLM(DecoderModel):
    """Solar Open: GLM-4.5's mixtures in every layer, whole heads rotated."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            partial_rotary_factor=1.0, moe_intermediate_size=1280, rope_theta=1e6, head_dim=128, first_k_dense_replace=0
        )
        inner = fields.get("intermediate_size") or fields.count("moe_intermediate_size")  # of no layer
        return Glm4MoeForCausalLM.read(fields.replaced(intermediate_size=inner))


class Glm4ForCausalLM(DecoderModel):
    """GLM-4-0414, GLM-Z1."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        names = BlockNames(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")
        return _glm(fields, names)
