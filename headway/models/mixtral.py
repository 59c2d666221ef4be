"""Mixtral: Mistral with a mixture in every layer."""

from __future__ import annotations

from dataclasses import replace

from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import ExpertNames, RouterSpec
from headway.models.mistral import MistralForCausalLM
from headway.models.mixtures import expert_count, read_mixture, with_mixture

NAMES = ExpertNames(products=(("w1", "w3"), "w2"))
"""Of experts whose products are numbered: w1 is the gate, w3 goes up, w2 down."""


RESPELLED = (
    (".mlp.", ".block_sparse_moe."),
    (".experts.gate_proj.", ".experts.w1."),
    (".experts.up_proj.", ".experts.w3."),
    (".experts.down_proj.", ".experts.w2."),
)
"""What other exporters call the same."""


class MixtralForCausalLM(DecoderModel):
    """Weights of the chosen experts are a softmax over these."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-5, num_experts_per_tok=2, rope_theta=1e6, sliding_window=None, num_local_experts=8
        )
        experts = expert_count(fields, "num_local_experts", "num_experts")
        if not experts:
            raise fields.refuse("num_local_experts", "must be a positive integer")
        router = RouterSpec(top_k=fields.count("num_experts_per_tok"))
        mixture = read_mixture(fields, experts, router, size="intermediate_size", names=NAMES)
        config = MistralForCausalLM.read(fields)
        config = with_mixture(config, range(len(config.blocks)), mixture, "block_sparse_moe")
        return replace(config, respelled=RESPELLED)
