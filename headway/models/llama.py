"""Llama 1 to 3.x and the many models that reuse its architecture (SmolLM2, TinyLlama, Yi, DeepSeek-Coder, ...)."""

from __future__ import annotations

from headway.models.config import Family
from headway.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The plain decoder."""

    family = Family(defaults={"max_position_embeddings": 2048}, mlp_bias="mlp_bias")
