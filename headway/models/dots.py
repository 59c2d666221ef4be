"""dots.llm1: Qwen3's attention, DeepSeek-V3's mixtures."""

from __future__ import annotations

from dataclasses import replace

from headway.models.config import FULL, SLIDING, layer_windows, llama_like
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.deepseek import EXPERTS
from headway.models.fields import Fields
from headway.models.mixtures import corrected_router, expert_count, read_mixture, with_mixture


class Dots1ForCausalLM(DecoderModel):
    """The first layers are dense."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=2048, n_group=1, topk_group=1, first_k_dense_replace=0, norm_topk_prob=False,
            routed_scaling_factor=1.0, sliding_window=4096, max_window_layers=62,
        )  # fmt: skip
        for name, known in (("scoring_func", ("sigmoid", "noaux_tc")), ("topk_method", ("noaux_tc",))):
            if fields.get(name) not in (None, *known):
                raise fields.refuse(name, f"is not implemented; {' and '.join(known)} are")
        layers, upper = fields.count("num_hidden_layers"), fields.whole("max_window_layers")
        slides = fields.get("sliding_window") is not None
        windows = layer_windows(fields, otherwise=[SLIDING if slides and i >= upper else FULL for i in range(layers)])
        bias = fields.flag("attention_bias")
        config = llama_like(fields, attention_bias=bias, qk_norm="head", windows=windows)
        experts, first = expert_count(fields, *EXPERTS), fields.whole("first_k_dense_replace", 0)
        if not experts:
            return config
        shared = fields.whole("n_shared_experts", 0) * fields.count("moe_intermediate_size")
        mixture = read_mixture(fields, experts, corrected_router(fields), shared=shared)
        return with_mixture(config, range(first, layers), replace(mixture, shared_name="shared_experts"))
