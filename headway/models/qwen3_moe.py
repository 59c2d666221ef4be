"""Qwen3-MoE: Qwen3 with a mixture in every layer, or in some."""

from __future__ import annotations

from headway.models.config import SLIDING
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import RouterSpec
from headway.models.mixtures import expert_count, read_mixture, sparse_layers, with_mixture
from headway.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(DecoderModel):
    """Weights of the chosen experts are a softmax over all, as they are or made to sum to one."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            num_key_value_heads=4, moe_intermediate_size=768, num_experts_per_tok=8, head_dim=None
        )
        if fields.flag("use_sliding_window") and fields.get("sliding_window") is not None:
            fields = fields.replaced(layer_types=[SLIDING] * fields.count("num_hidden_layers"))  # all, unlike Qwen3's
        experts = expert_count(fields.with_defaults(num_local_experts=128), "num_experts", "num_local_experts")
        router = RouterSpec(top_k=fields.count("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob"))
        config = Qwen3ForCausalLM.read(fields)
        layers = sparse_layers(fields, experts)
        return with_mixture(config, layers, read_mixture(fields, experts, router) if layers else None)
