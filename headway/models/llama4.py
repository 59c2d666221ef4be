"""Llama 4's text models: most layers see chunks of positions, every fourth sees everything and knows no positions; mixtures
beside a shared block, whose weights are those of what goes into the experts."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import FULL, llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import ExpertNames, MixtureSpec, RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture
from headway.models.rope import check_unscaled, read_rope

CHUNKED = "chunked_attention"
_EXPERTS = ("num_local_experts", "num_experts")


class Llama4ForCausalLM(DecoderModel):
    """Norms of queries and keys have no weights. They stand behind the rotation, which changes no length; so they may stand
    before it, where kernels have them."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
            intermediate_size_mlp=16384, use_qk_norm=True, attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1,
            attention_chunk_size=8192, no_rope_layer_interval=4, interleave_moe_layer_step=1,
        )  # fmt: skip
        sizes, layers = read_sizes(fields), fields.count("num_hidden_layers")
        rope = replace(read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position), interleaved=True)
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, rope=rope)
        every = fields.count("no_rope_layer_interval")
        rotated = fields.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
        kinds = fields.get("layer_types") or [CHUNKED if each else FULL for each in rotated]
        if len(rotated) < layers or len(kinds) != layers:
            raise fields.refuse("no_rope_layers", f"and layer_types must name {layers} layers")
        if unknown := set(kinds) - {CHUNKED, FULL}:
            raise fields.refuse("layer_types", f"has {min(unknown)!r}, which is not implemented")
        chunk = fields.count("attention_chunk_size") if CHUNKED in kinds else 0
        normed = fields.flag("use_qk_norm")
        if normed:
            check_unscaled(rope)
        tuning = (fields.number("floor_scale", least=1), fields.number("attn_scale"), 1.0)
        temperature = tuning if fields.flag("attn_temperature_tuning") else None
        inner = fields.count("intermediate_size_mlp")

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            mixer = replace(block.attention, chunk=chunk if kinds[layer] == CHUNKED else 0)
            if not rotated[layer]:
                mixer = replace(mixer, rope=None, temperature=temperature)
            elif normed:
                mixer = replace(mixer, qk_norm="head", norm_names=("", ""))
            names = replace(block.names, ffn="feed_forward")
            return replace(block, mixer=mixer, ffn=replace(block.mlp, size=inner), names=names)

        config, step = map_blocks(config, change), fields.count("interleave_moe_layer_step")
        named = fields.get("moe_layers")
        sparse = range(step - 1, layers, step) if named is None else tuple(named)
        expert_count(fields, *_EXPERTS)  # honoured where no layer has some, too
        return with_mixture(config, sparse, _mixture(fields) if len(sparse) else None)


def _mixture(fields: Fields) -> MixtureSpec:
    fields = fields.with_defaults(num_local_experts=16, num_experts_per_tok=1)
    router = RouterSpec(top_k=fields.count("num_experts_per_tok"), scoring="sigmoid", renormalise=False, name="router")
    experts = expert_count(fields, *_EXPERTS)
    size = "intermediate_size"
    mixture = read_mixture(
        fields, experts, router, size=size, names=ExpertNames(transposed=True), shared=fields.count(size)
    )
    return replace(mixture, weigh_inputs=True)
