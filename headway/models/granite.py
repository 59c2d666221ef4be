"""Granite: Llama with multipliers on embeddings, attention scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import STATE, check_activation, kinds_of, read_mamba2
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.moe import ExpertNames, MixtureSpec, RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture


class GraniteForCausalLM(DecoderModel):
    """The plain decoder with multipliers."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=2048)
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, mlp_bias=fields.flag("mlp_bias"))
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


_NAMES = ExpertNames(
    each="block_sparse_moe.experts.{}",
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)


def _mixture(fields: Fields, shared: int) -> MixtureSpec | None:
    """Every layer's, beside a block of size ``shared``; None: there are no experts."""
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    experts = expert_count(fields, "num_local_experts")
    if not experts:
        return None
    router = RouterSpec(top_k=fields.count("num_experts_per_tok"), name="block_sparse_moe.router.layer")
    mixture = read_mixture(fields, experts, router, size="intermediate_size", names=_NAMES, shared=shared)
    if mixture.shared is None:
        return mixture
    return replace(
        mixture, shared=replace(mixture.shared, names=(("input_linear",), "output_linear")), shared_name="shared_mlp"
    )


class GraniteMoeForCausalLM(DecoderModel):
    """Granite 3's mixtures: experts lie stacked in the checkpoint."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        mixture = _mixture(fields, 0)
        if mixture is None:
            raise fields.refuse("num_local_experts", "must be a positive integer")
        config = GraniteForCausalLM.read(fields)
        config = with_mixture(config, range(len(config.blocks)), mixture)
        return map_blocks(config, lambda _, block: replace(block, names=replace(block.names, ffn="")))


class GraniteMoeSharedForCausalLM(DecoderModel):
    """The same beside a block that every token passes."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        config = GraniteMoeForCausalLM.read(fields)
        mixture = _mixture(fields, fields.whole("shared_intermediate_size", 0))
        return with_mixture(config, range(len(config.blocks)), mixture)


class GraniteMoeHybridForCausalLM(DecoderModel):
    """Granite 4: Mamba-2 layers, and attention now and then, with the same multipliers; with experts or without."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True,
            shared_intermediate_size=1024, rms_norm_eps=1e-6, num_local_experts=8, rope_theta=10000.0,
            intermediate_size=11008,
        )  # fmt: skip
        kinds = kinds_of(fields, [STATE] * fields.count("num_hidden_layers"), "layer_types", "layers_block_type")
        check_activation(fields, kinds)
        rotates = fields.get("position_embedding_type")
        if rotates not in (None, "nope", "rope"):
            raise fields.refuse("position_embedding_type", "is not implemented; rope and null are")
        config = GraniteForCausalLM.read(fields)
        mamba = read_mamba2(fields, inner=int(fields.number("mamba_expand") * config.hidden_size))
        inner = fields.count("shared_intermediate_size")
        mixture = _mixture(fields, inner)

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
            shared = replace(block.ffn, size=inner, bias=False, names=(("input_linear",), "output_linear"))
            names = replace(block.names, ffn="" if mixture else "shared_mlp")
            block = replace(block, ffn=mixture or shared, names=names)
            if kinds[layer] == STATE:
                return replace(block, mixer=mamba, names=replace(block.names, mixer="mamba"))
            return block if rotates == "rope" else replace(block, mixer=replace(block.attention, rope=None))

        return map_blocks(config, change)
