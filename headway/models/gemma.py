"""Gemma 1, 2 and 3 (text): norms that store their weight minus 1, scaled embeddings, gelu; from 2 on norms behind both parts,
soft caps and sliding windows; from 3 on norms of heads and a second rotary base for sliding layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import FULL, SLIDING, layer_kinds, layer_windows, llama_like, map_blocks, read_ropes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.rope import RopeConfig

SANDWICH = BlockNames(
    after_mixer="post_attention_layernorm",
    before_ffn="pre_feedforward_layernorm",
    after_ffn="post_feedforward_layernorm",
)
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
}


def _gemma(
    fields: Fields,
    *,
    names: BlockNames,
    windows: tuple[int, ...] | None = None,
    qk_norm: bool = False,
    ropes: Mapping[str, RopeConfig] | None = None,
) -> DecoderConfig:
    """What all of them share, with the fields that only later ones have at values that leave them out."""
    if fields.get("hidden_activation") is None:
        fields = fields.with_defaults(hidden_act="gelu_pytorch_tanh")
    gelu = fields.choice("hidden_activation" if fields.get("hidden_activation") else "hidden_act", ACTIVATIONS)
    if gelu == "gelu" and fields.get("hidden_activation") is None:
        gelu = "gelu_tanh"  # what early exporters, who wrote "gelu", meant
    fields.get("hidden_act")
    bias = fields.flag("attention_bias")
    config = llama_like(
        fields, attention_bias=bias, windows=windows, names=names, qk_norm="head" if qk_norm else "",
        rope=None if ropes is None else ropes[FULL],
    )  # fmt: skip
    scalar = fields.get("query_pre_attn_scalar")
    scale = None if scalar is None else fields.number("query_pre_attn_scalar", least=1) ** -0.5
    cap = fields.number("attn_logit_softcapping", 0.0, least=0)

    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        mixer = replace(block.attention, scale=scale, soft_cap=cap)
        if ropes is not None:
            mixer = replace(mixer, rope=ropes[SLIDING if mixer.window else FULL])
        return replace(block, mixer=mixer, ffn=replace(block.mlp, activation=gelu))

    config = map_blocks(config, change)
    return replace(
        config,
        norm=replace(config.norm, plus_one=True),
        embedding_multiplier=config.hidden_size**0.5,
        round_multiplier=True,
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0, least=0),
    )


class GemmaForCausalLM(DecoderModel):
    """Gemma 1."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(**{**DEFAULTS, "hidden_activation": None}, max_position_embeddings=8192)
        return _gemma(fields, names=BlockNames())


class Gemma2ForCausalLM(DecoderModel):
    """Every other layer slides."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            **DEFAULTS, max_position_embeddings=8192, sliding_window=4096, query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0, num_key_value_heads=4,
        )  # fmt: skip
        return _gemma(fields, names=SANDWICH, windows=layer_windows(fields, otherwise=layer_kinds(fields, 2)))


class Gemma3ForCausalLM(DecoderModel):
    """Five of six layers slide, with a rotary base of their own."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            **DEFAULTS, max_position_embeddings=131072, sliding_window=4096, query_pre_attn_scalar=256,
            sliding_window_pattern=6, num_key_value_heads=4,
        )  # fmt: skip
        ropes = read_ropes(fields, full_theta=1e6, sliding_theta=1e4, sliding_field="rope_local_base_freq")
        kinds = layer_kinds(fields, fields.count("sliding_window_pattern"))
        if fields.get("attn_logit_softcapping"):
            raise fields.refuse(
                "attn_logit_softcapping", "is not implemented: implementations of Gemma 3 disagree; null is"
            )
        return _gemma(fields, names=SANDWICH, windows=layer_windows(fields, otherwise=kinds), qk_norm=True, ropes=ropes)
