"""Mistral and Ministral: Llama whose layers see a sliding window, all of them unless layer_types says otherwise."""

from __future__ import annotations

from headway.models.config import SLIDING, layer_windows, llama_like
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields


class MistralForCausalLM(DecoderModel):
    """The plain decoder with a sliding window."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        """The configuration in a config.json; see ``models.interface.Architecture``."""
        fields = fields.with_defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
        sliding = fields.get("sliding_window") is not None
        kinds = (SLIDING,) * fields.count("num_hidden_layers") if sliding else ()
        bias = fields.flag("attention_bias")
        return llama_like(fields, qkv_bias=bias, out_bias=bias, windows=layer_windows(fields, otherwise=kinds))


class MinistralForCausalLM(MistralForCausalLM):
    """The same, by the name under which newer exporters write models that mix sliding and full layers."""
