"""Phi-3.5-MoE: layer norms, biases, and two experts a token, each weighed among those whose scores are near its own."""

from __future__ import annotations

from dataclasses import replace

from headway.models.config import llama_like, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import RouterSpec
from headway.models.layers.norm import NormSpec
from headway.models.mixtral import NAMES, RESPELLED
from headway.models.mixtures import expert_count, read_mixture, with_mixture
from headway.models.rope import read_rope


class PhimoeForCausalLM(DecoderModel):
    """A window wider than the context it was trained on is taken as it is."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-5, rope_theta=1e6, num_experts_per_tok=2, num_local_experts=16, router_jitter_noise=0.01,
            num_key_value_heads=8,
        )  # fmt: skip
        if fields.count("num_experts_per_tok") != 2:
            raise fields.refuse("num_experts_per_tok", "is not implemented with this router; 2 is")
        window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
        bias, layers = fields.flag("attention_bias"), fields.count("num_hidden_layers")
        windows = None if window is None else (window,) * layers
        sizes = read_sizes(fields)
        rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, mscales=True)
        config = llama_like(fields, attention_bias=bias, windows=windows, rope=rope)
        margin = 2 * fields.number("router_jitter_noise", least=0)
        router = RouterSpec(top_k=2, scoring="sparsemixer", renormalise=False, margin=margin)
        experts = expert_count(fields, "num_local_experts", "num_experts")
        mixture = read_mixture(fields, experts, router, size="intermediate_size", names=NAMES)
        config = with_mixture(config, range(layers), mixture, "block_sparse_moe")
        return replace(
            config,
            norm=NormSpec(config.norm.eps, kind="layer", bias=True),
            head_bias=fields.flag("lm_head_bias"),
            respelled=(*RESPELLED, (".block_sparse_moe.router.", ".block_sparse_moe.gate.")),
        )
