"""Tencent's HunYuan V1: heads are normalised behind their rotation; dense, or mixtures beside a shared block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture
from headway.models.rope import RopeConfig, check_unscaled, read_rope


def _rope(fields: Fields) -> RopeConfig:
    """ "dynamic" with an alpha is a larger base, whatever the length."""
    sizes, own = read_sizes(fields), fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    alpha = own.get("alpha")
    known: dict[str, Any] = {name: value for name, value in own.items() if name not in ("alpha", "factor") or not alpha}
    if alpha:
        known |= {"rope_type": "default", "type": "default"}
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            known.pop(name, None)  # written, but of another kind
    outer = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = read_rope(outer | {"rope_parameters": known}, head_dim=sizes.head_dim, max_position=sizes.max_position)
    check_unscaled(rope)
    if not alpha:
        return rope
    stretch = Fields({"alpha": alpha}).number("alpha", least=1) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return replace(rope, theta=rope.theta * stretch)


class HunYuanDenseV1ForCausalLM(DecoderModel):
    """The 0.5B to 7B models."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048)
        if fields.with_defaults(use_qk_norm=True)["use_qk_norm"] is not True:
            raise fields.refuse("use_qk_norm", "is not implemented; true is")
        for name in ("use_cla", "mlp_bias"):
            if fields.flag(name):
                raise fields.refuse(name, "is not implemented; false is")
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, qk_norm="head", rope=_rope(fields))

        def change(_layer: int, block: BlockSpec) -> BlockSpec:
            names = ("query_layernorm", "key_layernorm")
            return replace(block, mixer=replace(block.attention, norm_behind=True, norm_names=names))

        return map_blocks(config, change)


class HunYuanMoEV1ForCausalLM(DecoderModel):
    """A13B: a mixture in every layer, beside a block as wide as the configuration says."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        def same(name: str) -> int:
            """A number for all layers, which some releases write once for each."""
            value = fields.get(name)
            if isinstance(value, list) and len(set(value)) > 1:
                raise fields.refuse(name, "is not implemented; the same number for all layers is")
            return Fields({name: value[0] if isinstance(value, list) and value else value}).count(name)

        config, experts = HunYuanDenseV1ForCausalLM.read(fields), expert_count(fields, "num_experts")
        inner = config.blocks[0].mlp.size
        size = same("moe_intermediate_size") if fields.get("moe_intermediate_size") else inner
        shared = same("num_shared_expert") if fields.get("num_shared_expert") else 1
        router = RouterSpec(top_k=same("moe_topk"), name="gate.wg")
        sizes = fields.replaced(moe_intermediate_size=size)
        mixture = read_mixture(sizes, experts, router, shared=shared * inner)
        return with_mixture(config, range(len(config.blocks)), replace(mixture, shared_name="shared_mlp"))
