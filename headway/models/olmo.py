"""OLMo 2 and 3: norms behind attention and feed-forward block only, and over all heads of queries and keys; 3 has sliding
layers, whose rotation is not stretched."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import FULL, SLIDING, layer_kinds, layer_windows, llama_like, map_blocks, read_ropes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import STATE, check_activation, kinds_of
from headway.models.interface import WeightMap
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.moe import RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture
from headway.models.qwen3_next import read_delta_net
from headway.models.rope import RopeConfig

NORMS_AFTER = BlockNames(
    before_mixer="", after_mixer="post_attention_layernorm", before_ffn="", after_ffn="post_feedforward_layernorm"
)


class Olmo2ForCausalLM(DecoderModel):
    """Full attention throughout."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
        bias = fields.flag("attention_bias")
        return llama_like(fields, attention_bias=bias, qk_norm="all", names=NORMS_AFTER)


class OlmoeForCausalLM(DecoderModel):
    """OLMoE: norms before both parts, and over all heads of queries and keys; a mixture in every layer."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts_per_tok=8)
        experts = expert_count(fields.with_defaults(num_experts=64), "num_experts", "num_local_experts")
        if not experts:
            raise fields.refuse("num_experts", "must be a positive integer")
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, qk_norm="all")
        router = RouterSpec(top_k=fields.count("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob"))
        mixture = read_mixture(fields, experts, router, size="intermediate_size")
        return with_mixture(config, range(len(config.blocks)), mixture)


class FlexOlmoForCausalLM(DecoderModel):
    """FlexOlmo: OLMoE's mixtures, with OLMo 2's norms."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(num_experts_per_tok=5, num_experts=7, rms_norm_eps=1e-6, rope_theta=5e5)
        config = OlmoeForCausalLM.read(fields)
        return map_blocks(config, lambda _, block: replace(block, names=NORMS_AFTER))


class Olmo3ForCausalLM(DecoderModel):
    """Three of four layers slide."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
        bias, ropes = fields.flag("attention_bias"), read_ropes(fields, full_theta=5e5, sliding_theta=5e5)
        windows = layer_windows(fields, otherwise=layer_kinds(fields, 4))
        config = llama_like(
            fields, attention_bias=bias, qk_norm="all", names=NORMS_AFTER, windows=windows, rope=ropes[FULL]
        )

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            return replace(
                block, mixer=replace(block.attention, rope=ropes[SLIDING if block.attention.window else FULL])
            )

        return map_blocks(config, change)


class OlmoHybridForCausalLM(DecoderModel):
    """Gated delta nets with norms before them, and attention with norms behind it every fourth layer, without rotation as
    released."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
        fields = fields.with_defaults(
            max_position_embeddings=65536, rms_norm_eps=1e-6, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
            linear_num_key_heads=heads, linear_num_value_heads=heads,
        )  # fmt: skip
        size = int(0.75 * hidden / fields.count("linear_num_key_heads"))
        fields = fields.with_defaults(linear_key_head_dim=size)
        fields = fields.with_defaults(linear_value_head_dim=2 * fields.count("linear_key_head_dim"))
        layers = fields.count("num_hidden_layers")
        every_fourth = [FULL if i % 4 == 3 or (layers < 4 and i == layers - 1) else STATE for i in range(layers)]
        kinds, bias = kinds_of(fields, every_fourth, "layer_types"), fields.flag("attention_bias")
        check_activation(fields, kinds)
        rotates = (fields.get("rope_parameters") or {}).get("rope_theta") or fields.get("rope_theta")
        rope = None if rotates else RopeConfig(theta=1.0, rotary_dim=2, original_len=1)  # of no layer
        config = llama_like(fields, attention_bias=bias, qk_norm="all", names=NORMS_AFTER, rope=rope)
        delta = read_delta_net(fields, "separate", 1e-5)
        scale = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
        delta = replace(delta, beta_scale=scale, names=("o_norm", "o_proj"))

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec)
            if kinds[layer] == STATE:
                return replace(block, mixer=delta, names=BlockNames(mixer="linear_attn"))
            return block if rotates else replace(block, mixer=replace(block.mixer, rope=None))

        return map_blocks(config, change)

    def weights(self) -> WeightMap:
        """Where each tensor of a checkpoint goes; some call two of the norms otherwise."""
        found = super().weights()
        others = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
        aliases = {
            name.replace(f".{usual}.", f".{other}."): name
            for name in found.targets
            for usual, other in others.items()
            if f".{usual}." in name
        }
        return replace(found, aliases=aliases)
