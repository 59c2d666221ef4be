"""Architectures by the name config.json gives them; their modules are imported when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from headway.core.errors import UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.encoder import EncoderConfig
from headway.models.encoder_config import SUFFIXES
from headway.models.fields import Fields
from headway.models.interface import Architecture, ModelConfig
from headway.models.purpose import DECODER_SUFFIXES, Wish, adapted

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "ArceeForCausalLM": "headway.models.llama:ArceeForCausalLM",
        "Cohere2ForCausalLM": "headway.models.cohere:Cohere2ForCausalLM",
        "CohereForCausalLM": "headway.models.cohere:CohereForCausalLM",
        "Exaone4ForCausalLM": "headway.models.exaone4:Exaone4ForCausalLM",
        "FalconH1ForCausalLM": "headway.models.falcon_h1:FalconH1ForCausalLM",
        "FalconMambaForCausalLM": "headway.models.mamba:FalconMambaForCausalLM",
        "Gemma2ForCausalLM": "headway.models.gemma:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "headway.models.gemma:Gemma3ForCausalLM",
        "GemmaForCausalLM": "headway.models.gemma:GemmaForCausalLM",
        "Glm4ForCausalLM": "headway.models.glm:Glm4ForCausalLM",
        "GlmForCausalLM": "headway.models.glm:GlmForCausalLM",
        "GraniteForCausalLM": "headway.models.granite:GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM": "headway.models.granite:GraniteMoeHybridForCausalLM",
        "JambaForCausalLM": "headway.models.jamba:JambaForCausalLM",
        "Lfm2ForCausalLM": "headway.models.lfm2:Lfm2ForCausalLM",
        "LlamaForCausalLM": "headway.models.llama:LlamaForCausalLM",
        "Mamba2ForCausalLM": "headway.models.mamba:Mamba2ForCausalLM",
        "MambaForCausalLM": "headway.models.mamba:MambaForCausalLM",
        "MinistralForCausalLM": "headway.models.mistral:MinistralForCausalLM",
        "MistralForCausalLM": "headway.models.mistral:MistralForCausalLM",
        "NemotronHForCausalLM": "headway.models.nemotron_h:NemotronHForCausalLM",
        "Olmo2ForCausalLM": "headway.models.olmo:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "headway.models.olmo:Olmo3ForCausalLM",
        "OlmoHybridForCausalLM": "headway.models.olmo:OlmoHybridForCausalLM",
        "Phi3ForCausalLM": "headway.models.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "headway.models.qwen2:Qwen2ForCausalLM",
        "Qwen3_5ForCausalLM": "headway.models.qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3ForCausalLM": "headway.models.qwen3:Qwen3ForCausalLM",
        "Qwen3NextForCausalLM": "headway.models.qwen3_next:Qwen3NextForCausalLM",
        "SeedOssForCausalLM": "headway.models.llama:SeedOssForCausalLM",
        "SmolLM3ForCausalLM": "headway.models.smollm3:SmolLM3ForCausalLM",
    }
)


ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        "Bert": "headway.models.bert:BertModel",
        "Camembert": "headway.models.bert:RobertaModel",
        "DebertaV2": "headway.models.deberta:DebertaV2Model",
        "DistilBert": "headway.models.distilbert:DistilBertModel",
        "EuroBert": "headway.models.eurobert:EuroBertModel",
        "Gte": "headway.models.rope_bert:GteModel",
        "JinaBert": "headway.models.rope_bert:JinaBertModel",
        "JinaEmbeddingsV3": "headway.models.rope_bert:JinaEmbeddingsV3Model",
        "MPNet": "headway.models.mpnet:MPNetModel",
        "ModernBert": "headway.models.modernbert:ModernBertModel",
        "New": "headway.models.rope_bert:GteModel",
        "NomicBert": "headway.models.rope_bert:NomicBertModel",
        "Roberta": "headway.models.bert:RobertaModel",
        "XLMRoberta": "headway.models.bert:RobertaModel",
    }
)
"""Families that see texts both ways; their architectures are the names with an ending of ``encoder_config.SUFFIXES``."""


_STEMS: Mapping[str, str] = MappingProxyType({"Gemma3Text": "Gemma3"})
"""Families whose models have another name without their output layer."""


def _path(architecture: str) -> str | None:
    found = ARCHITECTURES.get(architecture)
    for suffix in SUFFIXES:
        if found is None and architecture.endswith(suffix):
            found = ENCODERS.get(architecture.removesuffix(suffix))
    for suffix in DECODER_SUFFIXES:
        if found is None and architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix)
            found = ARCHITECTURES.get(f"{_STEMS.get(stem, stem)}ForCausalLM")
    return found


def model_class(architecture: str) -> Architecture:
    """The class that implements an architecture.

    Raises:
        UnsupportedModelError: there is none; lists what is supported.
    """
    path = _path(architecture)
    if path is None:
        endings = "|".join(SUFFIXES)
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}, and "
            f"{', '.join(ENCODERS)} with {endings}"
        )
    module, _, name = path.partition(":")
    return cast(Architecture, getattr(importlib.import_module(module), name))


def read_config(config: Mapping[str, Any], wish: Wish | None = None) -> ModelConfig:
    """Read a config.json, in the form of any transformers version.

    Args:
        wish: what the model is for; None: as its architecture says.

    Raises:
        ConfigError: the model cannot do what is wished for.
        UnsupportedModelError: an architecture, field or value that is not implemented, or is inconsistent; names it.
    """
    names = config.get("architectures") or []
    if len(names) != 1:
        raise UnsupportedModelError(f"config.json must name one architecture in 'architectures', got {names!r}")
    fields = Fields(config)
    found = model_class(names[0]).read(fields)
    if isinstance(found, DecoderConfig | EncoderConfig):
        found = adapted(found, fields, wish or Wish())
    fields.refuse_unread()
    return found
