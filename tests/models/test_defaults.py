"""A field that config.json leaves out means what it means to transformers: of each family's own default configuration one field
is left out after the other, and nothing may change."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from headway.core.errors import UnsupportedModelError
from headway.models.interface import ModelConfig
from headway.models.registry import ARCHITECTURES, read_config

OF_ENGINES = ("eos_token_id", "bos_token_id", "pad_token_id", "architectures", "tie_word_embeddings")
"""What is read of these is told beside the arithmetic; or it stands twice, here and in a nested object."""
NOT_THEIRS = ("MiMoForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "PhiMoEForCausalLM")
"""transformers has them under other names, or not."""
INCOMPLETE: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "num_experts_per_tok", "Gemma3ForConditionalGeneration": "mm_tokens_per_image",
    "Gemma4ForConditionalGeneration": "vision_config", "Glm4MoeForCausalLM": "set head_dim",
    "Idefics3ForConditionalGeneration": "image_size", "SmolVLMForConditionalGeneration": "image_size",
    "Qwen2VLForConditionalGeneration": "hidden_size",
    "Qwen2_5_VLForConditionalGeneration": "out_hidden_size", "Qwen3VLForConditionalGeneration": "out_hidden_size",
}  # fmt: skip
"""Default configurations that are no model's: what they are refused for."""
OTHERWISE: Mapping[str, tuple[str, ...]] = {
    "Gemma4ForCausalLM": ("rope_parameters", "per_layer_config"),
    "NemotronHForCausalLM": ("mamba_ssm_cache_dtype",),
    "OlmoHybridForCausalLM": ("rope_parameters",),
}
"""Fields without which a configuration of this family is another one; no release leaves them out."""


@cache
def families() -> dict[str, str]:
    """Architecture -> transformers' name of its configuration."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = dict[str, str]()
    for name in dir(modeling_auto):
        for family, classes in getattr(modeling_auto, name).items() if name.endswith("_MAPPING_NAMES") else ():
            for each in (classes,) if isinstance(classes, str) else classes:
                own = CONFIG_MAPPING_NAMES.get(family, "").removesuffix("Config")
                if each not in found or each.startswith((f"{own}For", f"{own.removesuffix('Text')}For")):
                    found[each] = family
    return found


def spelled_out(architecture: str, **given: Any) -> dict[str, Any]:
    """What transformers takes a configuration for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, Any] = CONFIG_MAPPING[families()[architecture]](**given).to_dict()
    return found | {"architectures": [architecture]}


def without(given: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**given, name: without(given[name], tuple(rest))}
    return {key: value for key, value in given.items() if key != name}


def read(given: Mapping[str, Any]) -> ModelConfig | None:
    """None: refused, since it does not say enough."""
    try:
        return read_config(dict(given))
    except UnsupportedModelError:
        return None


@cache
def generic() -> frozenset[str]:
    """Fields of every configuration there is."""
    from transformers import PretrainedConfig

    return frozenset(PretrainedConfig().to_dict())


KNOWN = sorted(name for name in ARCHITECTURES if name not in NOT_THEIRS and name not in INCOMPLETE)


@pytest.mark.parametrize("architecture", KNOWN)
def test_what_is_left_out_means_the_familys_default(architecture: str) -> None:
    given = spelled_out(architecture)
    whole, tried = read(given), 0
    assert whole is not None
    paths = [(name,) for name in given] + [("vision_config", name) for name in given.get("vision_config") or ()]
    for path in paths:
        if path[-1] in OF_ENGINES or path[-1] in generic() or path[-1] in OTHERWISE.get(architecture, ()):
            continue
        less = without(given, path)
        found = read(less)
        if found not in (None, whole):  # a nested object's own default, or one that others follow from
            try:
                theirs = spelled_out(architecture, **less)
            except Exception:  # refused there, by classes of errors of their own
                continue
            assert found == read(theirs), ".".join(path)
        tried += found is not None
    assert tried > 3


@pytest.mark.parametrize("architecture", INCOMPLETE)
def test_defaults_that_are_no_model(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match=INCOMPLETE[architecture]):
        read_config(spelled_out(architecture))
