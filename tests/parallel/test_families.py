"""Every family of the house on two ranks gives what it gives on one: cut where it can be, whole where it must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.core.errors import UnsupportedModelError
from headway.models.registry import ARCHITECTURES
from headway.parallel.mesh import Mesh
from tests.parallel.families import DECODERS, LATENTS, MIXTURES, STATES, alone, configuration, tokens_of, write
from tests.parallel.ranks import load_shard, logits_of, on_ranks
from tests.parallel.test_models import TOLERANCE

SIZES = [7, 1, 12, 2, 4]
ELSEWHERE = {
    "BartForConditionalGeneration", "MBartForConditionalGeneration", "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration", "WhisperForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration", "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "PaliGemmaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
}  # fmt: skip
"""Models with encoders: test_engines_of_families.py."""
OTHER_NAMES = {
    "MiMoForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "PhiMoEForCausalLM"
}  # fmt: skip
"""Of models that are here under the name of the family whose class they have."""
NAMES = (*DECODERS, *MIXTURES, *LATENTS, *STATES)


@pytest.mark.parametrize("name", NAMES)
def test_two_parts(name: str, tmp_path: Path) -> None:
    """The oracle is one rank, which other tests compare with transformers. Mixtures: cut experts, and whole ones."""
    write(configuration(name)[1], tmp_path)
    tokens = tokens_of()
    wanted = alone(tmp_path, tokens, SIZES)
    for whole in (False, True)[: 1 + (name in MIXTURES)]:
        found = logits_of(tmp_path, Mesh(2, 1), tokens, SIZES, whole_experts=whole)
        for each in found:
            torch.testing.assert_close(each, wanted, **TOLERANCE)
            assert torch.equal(each, found[0]), "all ranks must draw the same tokens"


STAGED = (
    "bloom",
    "gpt2",
    "gpt-bigcode",
    "opt",
    "gemma3",
    "granite-moe",
    "longcat",
    "v3.2-yarn-biases",
    "lfm2",
    "gemma3n",
    "gemma3n-shared",
    "gemma4",
    "gemma4-shared",
    "glm-dsa-shared",
    "zamba2",
)
"""Gemma 3n hands on several streams; of those that share keys, or what an indexer selected, the border is not in the middle."""


@pytest.mark.parametrize(
    "name", [name if name in STAGED else pytest.param(name, marks=pytest.mark.soak) for name in NAMES]
)
def test_two_stages(name: str, tmp_path: Path) -> None:
    write(configuration(name)[1], tmp_path)
    tokens = tokens_of()
    [found] = logits_of(tmp_path, Mesh(1, 2), tokens, SIZES)
    torch.testing.assert_close(found, alone(tmp_path, tokens, SIZES), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "stages", "says"),
    [
        ("gemma4-shared", 3, "reads what layer . caches, and 3 stages are too many"),
        ("glm-dsa-shared", 3, "of 3 stages one would begin with layer"),
    ],
)
def test_stages_that_no_border_keeps_apart(name: str, stages: int, says: str, tmp_path: Path) -> None:
    """Their layers need more of those before than hidden states."""
    write(configuration(name)[1], tmp_path)
    with pytest.raises(UnsupportedModelError, match=says):
        logits_of(tmp_path, Mesh(1, stages), tokens_of(), SIZES)


def test_no_family_is_left_out() -> None:
    covered = {configuration(name)[0] for name in NAMES} | ELSEWHERE | OTHER_NAMES
    assert covered == set(ARCHITECTURES)


def test_what_ranks_hold(tmp_path: Path) -> None:
    """Two ranks hold about half of a mixture each, whole experts or halves of all."""
    write(configuration("qwen3-moe")[1], tmp_path)

    def sizes(whole: bool) -> list[list[int]]:
        return on_ranks(
            Mesh(2, 1),
            lambda world: [
                tensor.numel()
                for name, tensor in load_shard(tmp_path, world, whole_experts=whole).named_parameters()
                if name.endswith(("ffn.gate_up", "ffn.down"))
            ],
        )

    for whole in (False, True):
        assert sizes(whole) == [[3 * 48 * 40, 3 * 40 * 24] * 2] * 2


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    config = configuration("llama4-two-experts")[1] | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 2,
    }
    write(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match="2 experts cannot be dealt out over 4 ranks"):
        on_ranks(Mesh(4, 1), lambda world: load_shard(tmp_path, world, whole_experts=True))


def test_as_many_ranks_as_experts(tmp_path: Path) -> None:
    """One expert each."""
    write(configuration("llama4-two-experts")[1] | {"num_local_experts": 2}, tmp_path)
    parts = on_ranks(Mesh(2, 1), lambda world: load_shard(tmp_path, world, whole_experts=True))
    held = [[len(each) for name, each in part.named_parameters() if name.endswith("ffn.down")] for part in parts]
    assert held[0] == held[1] and set(held[0]) == {1}


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    write(configuration("llama")[1], tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no experts to deal out; leave out enable_expert_parallel"):
        on_ranks(Mesh(2, 1), lambda world: load_shard(tmp_path, world, whole_experts=True))
