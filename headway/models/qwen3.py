"""Qwen3 (dense): per-head norms on queries and keys; optionally a sliding window on the upper layers."""

from __future__ import annotations

from headway.models.config import layer_windows, llama_like, upper_layers_slide
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class Qwen3ForCausalLM(DecoderModel):
    """The plain decoder with normalised queries and keys."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096, head_dim=128
        )
        switch, bias = "use_sliding_window", fields.flag("attention_bias")
        windows = layer_windows(fields, switch=switch, otherwise=upper_layers_slide(fields, switch))
        return llama_like(fields, attention_bias=bias, qk_norm="head", windows=windows)
