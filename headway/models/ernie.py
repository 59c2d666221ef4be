"""Llama with rotated pairs side by side: ERNIE 4.5, dense or with mixtures beside a shared block, and Helium."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.interface import Target, WeightMap
from headway.models.layers.moe import RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture

_CORRECTION = "moe_statics.e_score_correction_bias"
_RESPELLED = ((".mlp.gate.moe_statics.", ".mlp.moe_statics."),)


def _side_by_side(config: DecoderConfig) -> DecoderConfig:
    def change(_layer: int, block: BlockSpec) -> BlockSpec:
        attention = block.attention
        assert attention.rope is not None
        return replace(block, mixer=replace(attention, rope=replace(attention.rope, interleaved=True)))

    return map_blocks(config, change)


class Ernie4_5ForCausalLM(DecoderModel):  # noqa: N801 - the name that config.json has
    """The 0.3B model."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=131072, tie_word_embeddings=True,
            num_key_value_heads=2, head_dim=128,
        )  # fmt: skip
        bias = fields.flag("use_bias")
        return _side_by_side(llama_like(fields, attention_bias=bias, mlp_bias=bias))


class HeliumForCausalLM(DecoderModel):
    """Helium 1."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(rms_norm_eps=1e-8, rope_theta=1e5, max_position_embeddings=4096)
        bias = fields.flag("attention_bias")
        return _side_by_side(llama_like(fields, attention_bias=bias, out_bias=False, mlp_bias=fields.flag("mlp_bias")))


class Ernie4_5_MoeForCausalLM(DecoderModel):  # noqa: N801 - the name that config.json has
    """21B-A3B and 300B-A47B: a softmax, corrected where experts are chosen."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(num_key_value_heads=4, head_dim=None)
        config, layers = Ernie4_5ForCausalLM.read(fields), fields.count("num_hidden_layers")
        fields = fields.with_defaults(
            moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
            moe_layer_interval=1, moe_intermediate_size=1536,
        )  # fmt: skip
        if fields.with_defaults(moe_use_aux_free=True)["moe_use_aux_free"] is not True:
            raise fields.refuse("moe_use_aux_free", "is not implemented; true is")
        if fields.number("moe_norm_min", 0.0) > 1e-6:  # the least that weights are divided by
            raise fields.refuse("moe_norm_min", "is not implemented; 1e-12 is")
        experts = expert_count(fields, "moe_num_experts", "num_experts")
        router = RouterSpec(top_k=fields.count("moe_k"), correction=_CORRECTION)
        size, shared = fields.count("moe_intermediate_size"), fields.whole("moe_num_shared_experts", 0)
        mixture = read_mixture(fields, experts, router, shared=shared * size)
        if mixture.shared is not None:
            mixture = replace(mixture, shared=replace(mixture.shared, bias=fields.flag("use_bias")))
        mixture = replace(mixture, shared_name="shared_experts")
        first, end = (int(fields.number(f"moe_layer_{name}_index")) for name in ("start", "end"))
        every, last = fields.count("moe_layer_interval"), layers - 1 if end == -1 else end
        sparse = [i for i in range(layers) if (i + 1) % every == 0 and first <= i <= last]
        config = with_mixture(config, sparse, mixture)
        return replace(config, respelled=_RESPELLED, unused=("mtp_",), head_bias=fields.flag("use_bias"))

    def weights(self) -> WeightMap:
        """See ``DecoderModel``; what corrects scores is a matrix of one row in the checkpoint."""
        found = super().weights()
        rows = {name: Target(to.tensor[None]) for name, to in found.targets.items() if name.endswith(_CORRECTION)}
        return replace(found, targets={**found.targets, **rows})
