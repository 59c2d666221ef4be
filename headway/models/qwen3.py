"""Qwen3 (dense): per-head norms on queries and keys; optionally a sliding window on the upper layers."""

from __future__ import annotations

from headway.models.config import Family
from headway.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The plain decoder with normalised queries and keys."""

    family = Family(
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "head_dim": 128,
        },
        qk_norm=True,
        window_switch="use_sliding_window",
        refused=("mlp_bias",),
    )
