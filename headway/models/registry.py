"""Architectures by the name config.json gives them; their modules are imported when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from headway.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from headway.models.decoder import DecoderModel

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "headway.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "headway.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "headway.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "headway.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> type[DecoderModel]:
    """The class that implements an architecture.

    Raises:
        UnsupportedModelError: nobody does; lists what is supported.
    """
    path = ARCHITECTURES.get(architecture)
    if path is None:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    module, _, name = path.partition(":")
    return cast("type[DecoderModel]", getattr(importlib.import_module(module), name))
