"""Qwen2, Qwen2.5 and MiMo: biases on queries, keys and values; optionally a sliding window on the upper layers."""

from __future__ import annotations

from dataclasses import replace

from headway.models.config import layer_windows, llama_like, upper_layers_slide
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.mtp import MTPSpec, next_layers


class Qwen2ForCausalLM(DecoderModel):
    """The plain decoder with biased projections into attention."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096)
        switch = "use_sliding_window"
        fields.get("attention_bias")  # old exporters wrote it; it has no effect
        windows = layer_windows(fields, switch=switch, otherwise=upper_layers_slide(fields, switch))
        return llama_like(fields, attention_bias=True, out_bias=False, windows=windows)


class MiMoForCausalLM(DecoderModel):
    """MiMo-7B: Qwen2 with a layer for multi-token prediction."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        config, number, own = Qwen2ForCausalLM.read(fields), next_layers(fields), "model.mtp_layers.0"
        spec = MTPSpec(
            block=own,
            token_norm=f"{own}.token_layernorm",
            hidden_norm=f"{own}.hidden_layernorm",
            projection=f"{own}.input_proj",
            norm=f"{own}.final_layernorm",
            layers=number,
            hidden_first=True,
        )
        return replace(config, unused=("mtp_layers.",), mtp=spec if number else None)
