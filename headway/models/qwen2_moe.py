"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with mixtures and a shared block behind a gate."""

from __future__ import annotations

from dataclasses import replace

from headway.models.config import FULL, SLIDING, layer_windows, llama_like
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import MixtureSpec, RouterSpec
from headway.models.mixtures import expert_count, read_mixture, sparse_layers, with_mixture


def gated_shared_mixture(fields: Fields, experts: int, *, renormalise: bool) -> MixtureSpec:
    """A mixture beside a shared block whose weight is the sigmoid of a product; the latter's size has a field of its own."""
    router = RouterSpec(top_k=fields.count("num_experts_per_tok"), renormalise=renormalise)
    mixture = read_mixture(fields, experts, router, shared=fields.count("shared_expert_intermediate_size"))
    return replace(mixture, shared_gate="shared_expert_gate")


class Qwen2MoeForCausalLM(DecoderModel):
    """Biases on queries, keys and values, unless the configuration says otherwise."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=32768, num_key_value_heads=16, sliding_window=4096, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_experts_per_tok=4, qkv_bias=True, max_window_layers=28,
        )  # fmt: skip
        experts = expert_count(fields.with_defaults(num_experts=60), "num_experts", "num_local_experts")
        switch, layers = "use_sliding_window", fields.count("num_hidden_layers")
        kinds = (FULL,) * layers
        if fields.flag(switch):
            upper = fields.whole("max_window_layers")
            kinds = tuple(SLIDING if i % 2 == 0 and i < upper else FULL for i in range(layers))
        fields.get("attention_bias")  # old exporters wrote it; it has no effect
        windows = layer_windows(fields, switch=switch, otherwise=kinds)
        config = llama_like(fields, attention_bias=fields.flag("qkv_bias"), out_bias=False, windows=windows)
        sparse = sparse_layers(fields, experts)
        if not sparse:
            return config
        mixture = gated_shared_mixture(fields, experts, renormalise=fields.flag("norm_topk_prob"))
        return with_mixture(config, sparse, mixture)
