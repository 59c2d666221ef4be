"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and gated attention every fourth layer.

Feed-forward parts are dense, or mixtures with a shared block behind a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, check_activation, kinds_of
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.delta_net import DeltaNetSpec
from headway.models.mixtures import expert_count, sparse_layers, with_mixture
from headway.models.mtp import MTPSpec
from headway.models.qwen2_moe import gated_shared_mixture


def read_delta_net(fields: Fields, layout: Literal["grouped", "joined", "separate"], eps: float) -> DeltaNetSpec:
    """A gated delta net from fields that begin with ``linear_``."""
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if values % keys:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads={keys}")
    return DeltaNetSpec(
        num_key_heads=keys,
        num_heads=values,
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        taps=fields.count("linear_conv_kernel_dim"),
        norm_eps=eps,
        layout=layout,
    )


def _read(fields: Fields, layout: Literal["grouped", "joined"]) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=32768, head_dim=256, partial_rotary_factor=0.25, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        full_attention_interval=4, rope_theta=10000.0,
    )  # fmt: skip
    layers, every = fields.count("num_hidden_layers"), fields.count("full_attention_interval")
    every_few = [ATTENTION if (i + 1) % every == 0 else STATE for i in range(layers)]
    kinds = kinds_of(fields, every_few, "layer_types")
    check_activation(fields, kinds)
    bias = fields.flag("attention_bias")
    config = llama_like(fields, attention_bias=bias, qk_norm="head", partial=True)
    delta = read_delta_net(fields, layout, config.norm.eps)

    def change(layer: int, block: BlockSpec) -> BlockSpec:
        assert isinstance(block.mixer, AttentionSpec)
        if kinds[layer] == STATE:
            return replace(block, mixer=delta, names=BlockNames(mixer="linear_attn"))
        return replace(block, mixer=replace(block.mixer, gated=True))

    config = replace(map_blocks(config, change), norm=replace(config.norm, plus_one=True))
    attending = [layer for layer, kind in enumerate(kinds) if kind != STATE]
    return with_mtp(config, attending[-1]) if attending else config


def with_mtp(config: DecoderConfig, like: int) -> DecoderConfig:
    """``config`` of a checkpoint with a layer for multi-token prediction, whose block is as that of layer ``like``."""
    spec = MTPSpec(
        block="mtp.layers.0",
        token_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        like=like,
    )
    return replace(config, unused=("mtp.",), mtp=spec)


class Qwen3NextForCausalLM(DecoderModel):
    """Products of queries, keys, values and gates are one, interleaved by head."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            num_experts_per_tok=10, num_key_value_heads=2, norm_topk_prob=True, moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        )  # fmt: skip
        experts = expert_count(fields.with_defaults(num_experts=512), "num_experts", "num_local_experts")
        config, sparse = _read(fields, "grouped"), sparse_layers(fields, experts)
        if not sparse:
            return config
        mixture = gated_shared_mixture(fields, experts, renormalise=fields.flag("norm_topk_prob"))
        return with_mixture(config, sparse, mixture)


class Qwen3_5ForCausalLM(DecoderModel):  # noqa: N801 - the name that config.json has
    """Separate products."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        return _read(fields.with_defaults(num_key_value_heads=4), "joined")


class Qwen3_5MoeForCausalLM(DecoderModel):  # noqa: N801 - the name that config.json has
    """Separate products, and a mixture in every layer."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            num_key_value_heads=2, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            num_experts=256,
        )  # fmt: skip
        experts = expert_count(fields, "num_experts", "num_local_experts")
        if not experts:
            raise fields.refuse("num_experts", "must be a positive integer")
        config = _read(fields.with_defaults(intermediate_size=fields.count("moe_intermediate_size")), "joined")
        mixture = gated_shared_mixture(fields, experts, renormalise=True)
        return with_mixture(config, range(len(config.blocks)), mixture)
