"""Decoders with sight of other sizes and with other values than ``tiny_sight``'s, against transformers: what public checkpoints
of the families vary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.core.errors import UnsupportedModelError
from headway.engine.boot import build_engine
from headway.models.registry import read_config
from tests.engine.harness import run
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import (
    VOCAB,
    arguments,
    changed,
    hf_inputs,
    hf_logits,
    picture,
    request,
)


def vision(**values: Any) -> dict[str, Any]:
    return {"vision_config": values}


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int] | None]] = {
    "llava of SigLIP": (
        "llava", vision(model_type="siglip_vision_model") | {"vision_feature_select_strategy": "full"}, None,
    ),
    "llava of Qwen2, tied": ("llava", {"text_config": {"model_type": "qwen2", "tie_word_embeddings": True}}, None),
    "llava of another layer, without biases": (
        "llava", {"vision_feature_layer": -3, "multimodal_projector_bias": False}, None,
    ),
    "gemma3 of fewer rows": ("gemma3", {"mm_tokens_per_image": 4}, None),
    "paligemma 2, larger patches": (
        "paligemma",
        vision(patch_size=14)
        | {"text_config": {"model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 64}},
        None,
    ),
    "smolvlm of larger squares, tied": ("smolvlm", {"scale_factor": 4, "tie_word_embeddings": True}, None),
    "qwen2.5 without whole layers": ("qwen2.5", vision(fullatt_block_indexes=[]), None),
    "qwen2.5 of whole layers": ("qwen2.5", vision(fullatt_block_indexes=[0, 1, 2]), None),
    "qwen2.5 of windows of a row, tied": (
        "qwen2.5", vision(fullatt_block_indexes=[2], window_size=8) | {"tie_word_embeddings": True}, None,
    ),
    "qwen2.5 of other squares": ("qwen2.5", vision(spatial_merge_size=3, window_size=24), (24, 36)),
    "qwen3 without deepstack": ("qwen3", vision(deepstack_visual_indexes=[]), None),
    "qwen3 of a list out of order": ("qwen3", vision(deepstack_visual_indexes=[1, 0]), None),
    "qwen3 of few positions and larger squares": (
        "qwen3", vision(num_position_embeddings=4, spatial_merge_size=4), (32, 48),
    ),
    "mistral3 of single patches": ("mistral3", {"spatial_merge_size": 1, "multimodal_projector_bias": True}, None),
    "internvl of Qwen3, with biases": (
        "internvl", vision(attention_bias=True, use_mean_pooling=False) | {"text_config": {"model_type": "qwen3"}}, None,
    ),
    "gemma4 without ranges": ("gemma4", vision(use_clipped_linears=False, standardize=False), None),
    "gemma4 of smaller squares": ("gemma4", vision(pooling_kernel_size=2), (16, 16)),
    "gemma4 that sees from left to right": ("gemma4", {"text_config": {"use_bidirectional_attention": None}}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_logit_is_that_of_transformers(case: str) -> None:
    """Two pictures, of two sizes where the family has any."""
    name, change, size = CASES[case]
    one = changed(name, change)
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    drawn = np.random.default_rng(4).integers(0, 256, (2, 1, *(size or (1, 1)), 3), np.uint8)
    first, second = drawn if size else (picture(name, 1), picture(name, 2, larger=True))
    parts = [5, first, 7, 8, second, 9]
    asked = request(info, "r", parts, max_tokens=1, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)
    answer = run(core, [asked])["r"]
    assert answer.error is None
    ids, given = hf_inputs(one, info, parts)
    expected = hf_logits(one, ids, len(ids), given).log_softmax(-1)
    told = [*answer.prompt_logprobs, *answer.logprobs]
    assert len(told) == len(expected)
    for (tokens, values, _), row in zip(told, expected, strict=True):
        np.testing.assert_allclose(values, row[torch.tensor(tokens)], atol=1e-3)
    core.shutdown()


@pytest.mark.parametrize("layer", [0, -4, 4, -5])
def test_layers_that_are_not_there_are_refused(layer: int) -> None:
    """Of a tower of three; what enters the first block is no layer."""
    family, values = CONFIGS["llava"]
    config = {"architectures": [f"{family}ForConditionalGeneration"], **values, "vision_feature_layer": layer}
    with pytest.raises(UnsupportedModelError, match="vision_feature_layer"):
        read_config(config)
