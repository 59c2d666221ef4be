"""Architectures by the name config.json gives them; their modules are imported when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from headway.core.errors import UnsupportedModelError
from headway.models.fields import Fields
from headway.models.interface import Architecture, ModelConfig

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "ArceeForCausalLM": "headway.models.llama:ArceeForCausalLM",
        "CohereForCausalLM": "headway.models.cohere:CohereForCausalLM",
        "Cohere2ForCausalLM": "headway.models.cohere:Cohere2ForCausalLM",
        "Exaone4ForCausalLM": "headway.models.exaone4:Exaone4ForCausalLM",
        "GemmaForCausalLM": "headway.models.gemma:GemmaForCausalLM",
        "Gemma2ForCausalLM": "headway.models.gemma:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "headway.models.gemma:Gemma3ForCausalLM",
        "GlmForCausalLM": "headway.models.glm:GlmForCausalLM",
        "Glm4ForCausalLM": "headway.models.glm:Glm4ForCausalLM",
        "GraniteForCausalLM": "headway.models.granite:GraniteForCausalLM",
        "LlamaForCausalLM": "headway.models.llama:LlamaForCausalLM",
        "FalconMambaForCausalLM": "headway.models.mamba:FalconMambaForCausalLM",
        "MambaForCausalLM": "headway.models.mamba:MambaForCausalLM",
        "Mamba2ForCausalLM": "headway.models.mamba:Mamba2ForCausalLM",
        "MinistralForCausalLM": "headway.models.mistral:MinistralForCausalLM",
        "MistralForCausalLM": "headway.models.mistral:MistralForCausalLM",
        "Olmo2ForCausalLM": "headway.models.olmo:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "headway.models.olmo:Olmo3ForCausalLM",
        "Phi3ForCausalLM": "headway.models.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "headway.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "headway.models.qwen3:Qwen3ForCausalLM",
        "SeedOssForCausalLM": "headway.models.llama:SeedOssForCausalLM",
        "SmolLM3ForCausalLM": "headway.models.smollm3:SmolLM3ForCausalLM",
    }
)


def model_class(architecture: str) -> Architecture:
    """The class that implements an architecture.

    Raises:
        UnsupportedModelError: there is none; lists what is supported.
    """
    path = ARCHITECTURES.get(architecture)
    if path is None:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    module, _, name = path.partition(":")
    return cast(Architecture, getattr(importlib.import_module(module), name))


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json, in the form of any transformers version.

    Raises:
        UnsupportedModelError: an architecture, field or value that is not implemented, or is inconsistent; names it.
    """
    names = config.get("architectures") or []
    if len(names) != 1:
        raise UnsupportedModelError(f"config.json must name one architecture in 'architectures', got {names!r}")
    fields = Fields(config)
    found = model_class(names[0]).read(fields)
    fields.refuse_unread()
    return found
