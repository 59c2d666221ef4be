"""Mistral and Ministral: Llama whose layers see a sliding window, all of them unless layer_types says otherwise."""

from __future__ import annotations

from headway.models.config import Family
from headway.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """The plain decoder with a sliding window."""

    family = Family(
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        window_switch=None,
        refused=("mlp_bias",),
    )
