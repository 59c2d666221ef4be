"""Jamba: Mamba-1 layers whose time steps, b and c are normalised, and attention without positions now and then."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.bloom import without_rope
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, check_activation, kinds_of
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mamba import MambaSpec
from headway.models.layers.moe import RouterSpec
from headway.models.mamba import read_state_dtype
from headway.models.mixtures import read_mixture, with_mixture


class JambaForCausalLM(DecoderModel):
    """A mixture in every other layer, or as often as ``expert_layer_period`` says; with one expert in none."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=262144, num_key_value_heads=8, num_experts=16, attn_layer_period=8, attn_layer_offset=4,
            mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, expert_layer_period=2,
            expert_layer_offset=1, num_experts_per_tok=2,
        )  # fmt: skip
        layers, experts = fields.count("num_hidden_layers"), fields.count("num_experts")
        period, offset = fields.count("expert_layer_period"), fields.whole("expert_layer_offset")
        sparse = [i for i in range(layers) if experts > 1 and i % period == offset]
        router = RouterSpec(top_k=fields.count("num_experts_per_tok"), renormalise=False, name="router")
        mixture = read_mixture(fields, experts, router, size="intermediate_size") if sparse else None
        period, offset = fields.count("attn_layer_period"), fields.whole("attn_layer_offset")
        kinds = kinds_of(fields, [ATTENTION if i % period == offset else STATE for i in range(layers)])
        check_activation(fields, kinds)
        names = BlockNames(before_ffn="pre_ff_layernorm", ffn="feed_forward")
        config = llama_like(fields, names=names, rope=without_rope(fields))
        hidden, rank = config.hidden_size, fields.get("mamba_dt_rank")
        mamba = MambaSpec(
            inner=int(fields.number("mamba_expand") * hidden),
            state_size=fields.count("mamba_d_state"),
            rank=-(-hidden // 16) if rank in (None, "auto") else fields.count("mamba_dt_rank"),
            taps=fields.count("mamba_d_conv"),
            bias=fields.flag("mamba_proj_bias"),
            conv_bias=fields.flag("mamba_conv_bias"),
            norms="weighted",
            norm_eps=config.norm.eps,
            state_dtype=read_state_dtype(fields),
        )

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec)
            if kinds[layer] == ATTENTION:
                return replace(block, mixer=replace(block.mixer, rope=None))
            return replace(block, mixer=mamba, names=replace(names, mixer="mamba"))

        config = with_mixture(map_blocks(config, change), sparse, mixture)
        return replace(config, names=DecoderNames(norm="model.final_layernorm"))
