"""Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers on nearly everything."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.hybrid import STATE, check_activation, read_mamba2
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.side_by_side import SideBySideSpec


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise fields.refuse(name, f"must be {count} numbers")
    return tuple(Fields({name: value}).number(name) for value in values)


class FalconH1ForCausalLM(DecoderModel):
    """Both mixers read the same norm, and both are added to the residual."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=8192, num_key_value_heads=8, rms_norm_eps=1e-5, mamba_n_heads=128, mamba_n_groups=1,
            mamba_d_state=256, mamba_d_conv=4, mamba_conv_bias=True, mamba_d_ssm=1024, mamba_expand=2,
            mamba_norm_before_gate=True,
        )  # fmt: skip
        for name in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
            if fields.flag(name):
                raise fields.refuse(name, "is not implemented where attention and Mamba share their products")
        check_activation(fields, (STATE,))
        mlp_bias = fields.flag("mlp_bias")
        names = BlockNames(mixer="mixer", before_ffn="pre_ff_layernorm", ffn="feed_forward")
        config = llama_like(fields, mlp_bias=mlp_bias, names=names)
        inner = fields.get("mamba_d_ssm")
        if inner is None:
            inner = int(fields.number("mamba_expand") * fields.count("hidden_size"))
        norm = (
            ("gate last" if fields.flag("mamba_norm_before_gate") else "gate first")
            if fields.flag("mamba_rms_norm")
            else ""
        )
        mamba = read_mamba2(fields, inner=inner, norm=norm, out_bias="projectors_bias")
        attention_in, ssm_in = fields.number("attention_in_multiplier", 1.0), fields.number("ssm_in_multiplier", 1.0)
        keys = attention_in * fields.number("key_multiplier", 1.0)
        ssm = tuple(ssm_in * each for each in _numbers(fields, "ssm_multipliers", 5))
        gate, down = _numbers(fields, "mlp_multipliers", 2)
        outs = fields.number("attention_out_multiplier", 1.0), fields.number("ssm_out_multiplier", 1.0)

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
            both = SideBySideSpec(
                attention=block.mixer,
                mamba=mamba,
                in_multipliers=(attention_in, keys, attention_in, *ssm),
                out_multipliers=outs,
            )
            return replace(block, mixer=both, ffn=replace(block.ffn, multipliers=(gate, down)))

        return replace(
            map_blocks(config, change),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            logit_multiplier=fields.number("lm_head_multiplier", 1.0),
            names=DecoderNames(norm="model.final_layernorm"),
        )
