"""Every option of a family by itself: what none of its tiny models turns is turned, each factor is changed, and logits are
transformers' or the option is refused by its name. Where only whole configurations are compared, an option that no release sets
may be read and handed on to the wrong place, or to one of two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import pytest
import torch

from headway.core.errors import UnsupportedModelError
from headway.models.registry import ENCODERS
from tests.latent import tiny_latents
from tests.models import tiny
from tests.models.harness import Machine
from tests.models.test_defaults import generic
from tests.models.walk import oracle, poolers
from tests.models.walk.draw import own_fields
from tests.models.walk.groups import judge, members
from tests.models.walk.verdict import Outcome
from tests.multimodal.tiny_configs import CONFIGS
from tests.recurrent import tiny_hybrids

IDLE: Final = re.compile(
    r"use_cache|output_|cross_attention|drop|init|loss|coef|jitter|rescale|in_fp32|mambapy|kernels|associative|overlap"
)
"""Options of training, of what is given besides, and of how transformers computes the same."""
REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta"), ("is_decoder",)),
    "Bart": ("tie_word_embeddings",), "MBart": ("tie_word_embeddings",), "Whisper": ("tie_word_embeddings",),
    "gemma4": ("attention_bias",), "internvl": ("use_absolute_position_embeddings", "use_qk_norm"),
    "Bloom": ("apply_residual_connection_post_layernorm",), "Cohere": ("use_qk_norm",), "DeepseekV2": ("norm_topk_prob",),
    "DeepseekV32": ("mlp_bias",), "FalconH1": ("attention_bias", "mamba_proj_bias", "projectors_bias"),
    "GPT2": ("scale_attn_weights",), "GPTBigCode": ("scale_attn_weights",),
    "Gemma3Text": ("use_bidirectional_attention",), "Gemma4Text": ("attention_bias",), "GlmMoeDsa": ("mlp_bias",),
    "KimiLinear": ("tie_word_embeddings",), "MiniCPM3": ("mlp_bias",), "Mpt": ("no_bias",),
    "NemotronH": ("tie_word_embeddings",), "OPT": ("_remove_final_layer_norm", "do_layer_norm_before", "enable_bias",
    "layer_norm_elementwise_affine"), "Phi": ("qk_layernorm",), "StableLm": ("qk_layernorm",),
    "Zamba2": ("tie_word_embeddings", "use_long_context"),
}  # fmt: skip
"""Options that are refused by their names: those of towers stand under the names of their tiny models."""
CASES: Final = ((tiny, tiny.TINY), (tiny_latents, tiny_latents.LATENTS), (tiny_hybrids, tiny_hybrids.HYBRIDS))
FAMILIES: Final[Mapping[str, tuple[ModuleType, Sequence[Any]]]] = {
    family: (module, [case for case in cases.values() if case.family == family])
    for module, cases in CASES
    for family in dict.fromkeys(case.family for case in cases.values())
}
TOKENS: Final = oracle.tokens_of(1, 97, tiny.LENGTH)
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_BART: Final = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 28, "max_position_embeddings": 96,
    "decoder_start_token_id": 3, "forced_bos_token_id": None, "forced_eos_token_id": None,
}  # fmt: skip
_T5: Final = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4, "n_positions": 64,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 3,
}  # fmt: skip
_WHISPER: Final = _BART | {
    "max_source_positions": 15, "max_target_positions": 96, "num_mel_bins": 5, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
OWN_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "DistilBert": {"vocab_size": 97, "dim": 32, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
    "Bart": _BART, "MBart": _BART, "T5": _T5, "MT5": _T5, "Whisper": _WHISPER,
}  # fmt: skip
WALKED: Final = [
    *(("poolers", name) for name in poolers.architectures() if re.search("Model$|ForSequence", name)
      and re.sub("Model$|ForSeq.*", "", name) in ENCODERS),
    *(("encoder-decoders", name) for name in members("encoder-decoders")),
]  # fmt: skip


def options(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Names, and values that none of the configurations has."""
    for name, value in configs[0].items():
        if IDLE.search(name) or (name in generic() and name != "tie_word_embeddings"):
            continue
        if isinstance(value, bool) and {config.get(name) for config in configs} == {value}:
            yield name, not value
        elif isinstance(value, float):
            yield name, 0.05 if "eps" in name else value * 1.5 or 0.5


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_option_does_what_it_does_in_transformers(family: str) -> None:
    module, cases = FAMILIES[family]
    plain = [module.hf_model(case) for case in cases]
    unchanged = [logits_of(model) for model in plain]
    refused, tried = [], 0
    for name, value in options([model.config.to_dict() for model in plain]):
        for case, before in zip(cases, unchanged, strict=True):
            theirs = module.hf_model(replace(case, config={**case.config, name: value}))
            wanted = logits_of(theirs)
            if not torch.equal(wanted, before):
                break  # the first in which it means something; where it means nothing, the last
        try:
            found = Machine(tiny.ours(theirs)).in_chunks(TOKENS, [7, 1, 12, 2, 4])
        except UnsupportedModelError as error:
            refused.append(name if name in str(error) else str(error))
        else:
            apart = float((found - wanted).abs().max())
            assert apart <= 1e-3 * max(1.0, float(wanted.std())), f"{name} = {value}: {apart}"
            tried += 1
    assert tried, "nothing was compared"
    assert tuple(sorted(refused)) == REFUSED.get(family, ())


@pytest.mark.parametrize(("group", "architecture"), WALKED)
def test_an_option_of_an_encoder(group: str, architecture: str) -> None:
    import transformers

    stem = re.sub("Model$|For.*", "", architecture)
    sizes = OWN_SIZES.get(stem, SIZES)
    fields = {**own_fields(getattr(transformers, architecture).config_class), **sizes}
    walked(group, architecture, stem, {name: {**sizes, name: value} for name, value in options([fields])})


@pytest.mark.parametrize("name", members("pictured"))
def test_an_option_of_a_tower(name: str) -> None:
    import transformers

    family, config = CONFIGS[name]
    vision: Any = type(getattr(transformers, f"{family}Config")(**config).vision_config)
    fields = {**own_fields(vision), **config["vision_config"]}
    walked("pictured", name, name, {each: {"vision_config": {each: value}} for each, value in options([fields])})


def walked(group: str, architecture: str, family: str, changes: Mapping[str, dict[str, Any]]) -> None:
    """What ``tests/models/walk`` says of each change, by the option that it turns."""
    refused = []
    for name, fields in changes.items():
        verdict = judge(group, architecture, 2, fields)
        if verdict.outcome is Outcome.REFUSED:
            refused.append(name if name in verdict.detail else verdict.detail)
        else:
            assert verdict.outcome is Outcome.EQUAL, f"{name}: {verdict}"
    assert tuple(sorted(refused)) == REFUSED.get(family, ())
