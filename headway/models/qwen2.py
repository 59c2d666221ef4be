"""Qwen2 and Qwen2.5: biases on queries, keys and values; optionally a sliding window on the upper layers."""

from __future__ import annotations

from headway.models.config import Family
from headway.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The plain decoder with biased projections into attention."""

    family = Family(
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        qkv_bias=True,
        o_bias=False,
        window_switch="use_sliding_window",
        refused=("mlp_bias",),
    )
