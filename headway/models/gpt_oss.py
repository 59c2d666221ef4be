"""gpt-oss: attention sinks, windows on every other layer, biases everywhere, and experts with a clamped activation, which the
published checkpoints have in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.models.config import FULL, SLIDING, layer_windows, llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.layers.moe import ExpertNames, RouterSpec
from headway.models.mixtures import expert_count, read_mixture, with_mixture

_NAMES = ExpertNames(
    stacked_biases=("experts.gate_up_proj_bias", "experts.down_proj_bias"), transposed=True, interleaved=True
)


class GptOssForCausalLM(DecoderModel):
    """A router with a bias; weights are a softmax over the chosen experts."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rms_norm_eps=1e-5, head_dim=64, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=128,
            attention_bias=True, num_local_experts=128, swiglu_alpha=1.702, swiglu_limit=7.0, rope_theta=150000.0,
        )  # fmt: skip
        if fields.get("num_experts_per_tok") is None and fields.get("experts_per_token") is not None:
            fields = fields.with_defaults(num_experts_per_tok=fields["experts_per_token"])
        if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
            fields = fields.replaced(rope_scaling=_YARN)
        layers = fields.count("num_hidden_layers")
        alternating = [SLIDING if i % 2 == 0 else FULL for i in range(layers)]
        bias = fields.flag("attention_bias")
        windows = layer_windows(fields, otherwise=alternating)
        config = llama_like(fields, attention_bias=bias, windows=windows)
        config = map_blocks(config, lambda _, block: replace(block, mixer=replace(block.attention, sinks=True)))
        router = RouterSpec(
            top_k=fields.with_defaults(num_experts_per_tok=4).count("num_experts_per_tok"), bias=True, name="router"
        )
        experts = expert_count(fields, "num_local_experts", "num_experts")
        mixture = replace(
            read_mixture(fields, experts, router, size="intermediate_size", names=_NAMES),
            activation="clamped_swiglu",
            bias=True,
            limit=fields.number("swiglu_limit", least=0),
            alpha=fields.number("swiglu_alpha"),
            fp4=_in_fp4(fields),
        )
        return with_mixture(config, range(layers), mixture)


_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _in_fp4(fields: Fields) -> bool:
    """Whether the experts, and these alone, are in MXFP4."""
    found = fields.get("quantization_config")
    if found is None:
        return False
    if not isinstance(found, Mapping) or found.get("quant_method") != "mxfp4":
        raise fields.refuse("quantization_config", "is not implemented for this model; mxfp4 is")
    if any("experts" in str(name) for name in found.get("modules_to_not_convert") or ()):
        raise fields.refuse("quantization_config", "leaves experts out, which is not implemented")
    for name in ("hidden_size", "intermediate_size"):
        if fields.count(name) % 64:
            raise fields.refuse(name, "must be a multiple of 64 where experts are in mxfp4")
    return True
