"""Architectures by the name config.json gives them; their modules are imported when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from headway.core.errors import ConfigError, UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.encoder import EncoderConfig
from headway.models.encoder_config import SUFFIXES
from headway.models.encoder_decoder import EncoderDecoderConfig
from headway.models.fields import Fields
from headway.models.interface import Architecture, ModelConfig
from headway.models.purpose import DECODER_SUFFIXES, Wish, adapted

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "ArceeForCausalLM": "headway.models.llama:ArceeForCausalLM",
        "BloomForCausalLM": "headway.models.bloom:BloomForCausalLM",
        "BartForConditionalGeneration": "headway.models.bart:BartForConditionalGeneration",
        "Cohere2ForCausalLM": "headway.models.cohere:Cohere2ForCausalLM",
        "CohereForCausalLM": "headway.models.cohere:CohereForCausalLM",
        "DeepseekV2ForCausalLM": "headway.models.deepseek:DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM": "headway.models.deepseek:DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM": "headway.models.deepseek:DeepseekV3ForCausalLM",
        "Dots1ForCausalLM": "headway.models.dots:Dots1ForCausalLM",
        "Ernie4_5ForCausalLM": "headway.models.ernie:Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM": "headway.models.ernie:Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM": "headway.models.exaone4:Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM": "headway.models.exaone4:ExaoneMoeForCausalLM",
        "FalconForCausalLM": "headway.models.bloom:FalconForCausalLM",
        "FalconH1ForCausalLM": "headway.models.falcon_h1:FalconH1ForCausalLM",
        "FalconMambaForCausalLM": "headway.models.mamba:FalconMambaForCausalLM",
        "GPT2LMHeadModel": "headway.models.gpt2:GPT2LMHeadModel",
        "GPTBigCodeForCausalLM": "headway.models.gpt2:GPTBigCodeForCausalLM",
        "FlexOlmoForCausalLM": "headway.models.olmo:FlexOlmoForCausalLM",
        "GPTJForCausalLM": "headway.models.gpt_neox:GPTJForCausalLM",
        "GPTNeoXForCausalLM": "headway.models.gpt_neox:GPTNeoXForCausalLM",
        "Gemma2ForCausalLM": "headway.models.gemma:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "headway.models.gemma:Gemma3ForCausalLM",
        "Gemma3nForCausalLM": "headway.models.gemma3n:Gemma3nForCausalLM",
        "Gemma4ForCausalLM": "headway.models.gemma4:Gemma4ForCausalLM",
        "Gemma3nForConditionalGeneration": "headway.models.gemma3n_media:Gemma3nForConditionalGeneration",
        "GemmaForCausalLM": "headway.models.gemma:GemmaForCausalLM",
        "Gemma3ForConditionalGeneration": "headway.models.sighted:Gemma3ForConditionalGeneration",
        "Glm4ForCausalLM": "headway.models.glm:Glm4ForCausalLM",
        "Glm4MoeForCausalLM": "headway.models.glm:Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM": "headway.models.deepseek:Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM": "headway.models.deepseek:GlmMoeDsaForCausalLM",
        "GlmForCausalLM": "headway.models.glm:GlmForCausalLM",
        "GptOssForCausalLM": "headway.models.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "headway.models.granite:GraniteForCausalLM",
        "GraniteMoeForCausalLM": "headway.models.granite:GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM": "headway.models.granite:GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM": "headway.models.granite:GraniteMoeSharedForCausalLM",
        "HunYuanDenseV1ForCausalLM": "headway.models.hunyuan:HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM": "headway.models.hunyuan:HunYuanMoEV1ForCausalLM",
        "Gemma4ForConditionalGeneration": "headway.models.gemma4_media:Gemma4ForConditionalGeneration",
        "HeliumForCausalLM": "headway.models.ernie:HeliumForCausalLM",
        "Idefics3ForConditionalGeneration": "headway.models.sighted:Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration": "headway.models.sighted:InternVLForConditionalGeneration",
        "JambaForCausalLM": "headway.models.jamba:JambaForCausalLM",
        "KimiLinearForCausalLM": "headway.models.kimi_linear:KimiLinearForCausalLM",
        "Lfm2ForCausalLM": "headway.models.lfm2:Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM": "headway.models.lfm2:Lfm2MoeForCausalLM",
        "Llama4ForCausalLM": "headway.models.llama4:Llama4ForCausalLM",
        "LlavaForConditionalGeneration": "headway.models.sighted:LlavaForConditionalGeneration",
        "LlamaForCausalLM": "headway.models.llama:LlamaForCausalLM",
        "LongcatFlashForCausalLM": "headway.models.longcat:LongcatFlashForCausalLM",
        "Mamba2ForCausalLM": "headway.models.mamba:Mamba2ForCausalLM",
        "MBartForConditionalGeneration": "headway.models.bart:MBartForConditionalGeneration",
        "MT5ForConditionalGeneration": "headway.models.t5:MT5ForConditionalGeneration",
        "MambaForCausalLM": "headway.models.mamba:MambaForCausalLM",
        "MiMoForCausalLM": "headway.models.qwen2:MiMoForCausalLM",
        "MiniCPM3ForCausalLM": "headway.models.minicpm3:MiniCPM3ForCausalLM",
        "MiniMaxForCausalLM": "headway.models.minimax:MiniMaxForCausalLM",
        "MiniMaxM1ForCausalLM": "headway.models.minimax:MiniMaxForCausalLM",
        "MiniMaxM2ForCausalLM": "headway.models.minimax:MiniMaxM2ForCausalLM",
        "MiniMaxText01ForCausalLM": "headway.models.minimax:MiniMaxForCausalLM",
        "MinistralForCausalLM": "headway.models.mistral:MinistralForCausalLM",
        "Ministral3ForCausalLM": "headway.models.mistral:Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration": "headway.models.sighted:Mistral3ForConditionalGeneration",
        "MistralForCausalLM": "headway.models.mistral:MistralForCausalLM",
        "MptForCausalLM": "headway.models.bloom:MptForCausalLM",
        "MixtralForCausalLM": "headway.models.mixtral:MixtralForCausalLM",
        "NemotronHForCausalLM": "headway.models.nemotron_h:NemotronHForCausalLM",
        "Olmo2ForCausalLM": "headway.models.olmo:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "headway.models.olmo:Olmo3ForCausalLM",
        "OlmoeForCausalLM": "headway.models.olmo:OlmoeForCausalLM",
        "OlmoHybridForCausalLM": "headway.models.olmo:OlmoHybridForCausalLM",
        "OPTForCausalLM": "headway.models.gpt2:OPTForCausalLM",
        "PaliGemmaForConditionalGeneration": "headway.models.sighted:PaliGemmaForConditionalGeneration",
        "Phi3ForCausalLM": "headway.models.phi3:Phi3ForCausalLM",
        "PhiForCausalLM": "headway.models.gpt_neox:PhiForCausalLM",
        "PhiMoEForCausalLM": "headway.models.phimoe:PhimoeForCausalLM",
        "PhimoeForCausalLM": "headway.models.phimoe:PhimoeForCausalLM",
        "Qwen2ForCausalLM": "headway.models.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "headway.models.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3_5ForCausalLM": "headway.models.qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3ForCausalLM": "headway.models.qwen3:Qwen3ForCausalLM",
        "Qwen3_5MoeForCausalLM": "headway.models.qwen3_next:Qwen3_5MoeForCausalLM",
        "Qwen3MoeForCausalLM": "headway.models.qwen3_moe:Qwen3MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": "headway.models.sighted:Qwen2_5_VLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration": "headway.models.sighted:Qwen2VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration": "headway.models.sighted:Qwen3VLForConditionalGeneration",
        "Qwen3NextForCausalLM": "headway.models.qwen3_next:Qwen3NextForCausalLM",
        "SeedOssForCausalLM": "headway.models.llama:SeedOssForCausalLM",
        "SmolVLMForConditionalGeneration": "headway.models.sighted:SmolVLMForConditionalGeneration",
        "SmolLM3ForCausalLM": "headway.models.smollm3:SmolLM3ForCausalLM",
        "SolarOpenForCausalLM": "headway.models.glm:SolarOpenForCausalLM",
        "StableLmForCausalLM": "headway.models.gpt_neox:StableLmForCausalLM",
        "Starcoder2ForCausalLM": "headway.models.gpt_neox:Starcoder2ForCausalLM",
        "T5ForConditionalGeneration": "headway.models.t5:T5ForConditionalGeneration",
        "WhisperForConditionalGeneration": "headway.models.whisper:WhisperForConditionalGeneration",
        "YoutuForCausalLM": "headway.models.deepseek:YoutuForCausalLM",
        "Zamba2ForCausalLM": "headway.models.zamba2:Zamba2ForCausalLM",
    }
)


ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        "Albert": "headway.models.albert:AlbertModel",
        "Bert": "headway.models.bert:BertModel",
        "Camembert": "headway.models.bert:RobertaModel",
        "DebertaV2": "headway.models.deberta:DebertaV2Model",
        "DistilBert": "headway.models.distilbert:DistilBertModel",
        "Electra": "headway.models.bert:ElectraModel",
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


WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV4ForCausalLM": "its compressed attention caches an entry for every 4 and for every 128 tokens, and caches "
        "here have one for each token; besides, its experts are chosen by hashes and its residual is four streams. Take a "
        "DeepseekV32ForCausalLM",
    }
)
"""Architectures that people will try, and what stands in their way."""


def _path(architecture: str) -> str | None:
    found = ARCHITECTURES.get(architecture)
    for suffix in SUFFIXES:
        if found is None and architecture.endswith(suffix):
            found = ENCODERS.get(architecture.removesuffix(suffix))
    for suffix in DECODER_SUFFIXES:
        if found is None and architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix)
            # families have another name without their output layer: Gemma3TextModel
            found = ARCHITECTURES.get(f"{stem}ForCausalLM") or ARCHITECTURES.get(
                f"{stem.removesuffix('Text')}ForCausalLM"
            )
    return found


def model_class(architecture: str) -> Architecture:
    """The class that implements an architecture.

    Raises:
        UnsupportedModelError: there is none; lists what is supported.
    """
    path = _path(architecture)
    if path is None and architecture in WHY_NOT:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported: {WHY_NOT[architecture]}")
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
    if isinstance(found, EncoderDecoderConfig):
        if wish is not None and wish.pools:
            raise ConfigError(f"{found.architecture} generates, and cannot pool; use runner='generate' or 'auto'")
    elif isinstance(found, DecoderConfig | EncoderConfig):
        if isinstance(found, EncoderConfig) and fields.flag("is_decoder"):
            raise fields.refuse("is_decoder", "is not implemented: these models see texts both ways; false is")
        found = adapted(found, fields, wish or Wish())
    fields.refuse_unread()
    return found
