"""Granite (dense): Llama with multipliers on embeddings, attention scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import STATE, kinds_of, read_mamba2
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec


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
            return replace(block, mixer=replace(block.attention, scale=scale), residual_multiplier=residual)

        return replace(
            map_blocks(config, change),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            logit_multiplier=1 / divisor,
        )


class GraniteMoeHybridForCausalLM(DecoderModel):
    """Granite 4: Mamba-2 layers, and attention now and then, with the same multipliers. Its dense members: no experts."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        fields = fields.with_defaults(
            mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True,
            shared_intermediate_size=1024, rms_norm_eps=1e-6, num_local_experts=8, rope_theta=10000.0,
            intermediate_size=fields.get("shared_intermediate_size", 1024),
        )  # fmt: skip
        kinds = kinds_of(fields, [STATE] * fields.count("num_hidden_layers"), "layer_types", "layers_block_type")
        rotates = fields.get("position_embedding_type")
        if rotates not in (None, "nope", "rope"):
            raise fields.refuse("position_embedding_type", "is not implemented; rope and null are")
        config = GraniteForCausalLM.read(fields)
        mamba = read_mamba2(fields, inner=int(fields.number("mamba_expand") * config.hidden_size))
        inner = fields.count("shared_intermediate_size")

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
            shared = replace(block.ffn, size=inner, bias=False, names=(("input_linear",), "output_linear"))
            block = replace(block, ffn=shared, names=replace(block.names, ffn="shared_mlp"))
            if kinds[layer] == STATE:
                return replace(block, mixer=mamba, names=replace(block.names, mixer="mamba"))
            return block if rotates == "rope" else replace(block, mixer=replace(block.attention, rope=None))

        return map_blocks(config, change)
