"""A random walk over configurations (``tests/models/walk``): what it found, a few steps of it, and the whole of it by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engine.harness import run
from tests.models.harness import Machine
from tests.models.walk import decoders
from tests.models.walk.draw import own_fields, standard_names
from tests.models.walk.groups import GROUPS, judge, members, walk
from tests.models.walk.rules import RULES, matches
from tests.models.walk.verdict import Outcome
from tests.multimodal.tiny_configs import CONFIGS

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 97,
}  # fmt: skip
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA: dict[str, Any] = SIZES | {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_GPT = {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")} | {
    "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 96,
}  # fmt: skip


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_LONG = {"original_max_position_embeddings": 64, "short_factor": [1.5] * 4, "long_factor": [2.0] * 4}
FOUND: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "part of a head": ("decoders", "LlamaForCausalLM", SIZES | _rope("default", partial_rotary_factor=0.5),
                       "partial_rotary_factor"),
    "scales of another family": ("decoders", "MistralForCausalLM",
                                 SIZES | _rope("longrope", **_LONG, short_mscale=1.2, long_mscale=1.3), "short_mscale"),
    "a scaled rotation before norms": (
        "mixtures", "Llama4ForCausalLM",
        SIZES | _rope("yarn", factor=4.0, original_max_position_embeddings=8)
        | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 64},
        "attention_factor"),
    "pictures alone both ways": (
        "poolers", "Gemma4TextModel",
        SIZES | GEMMA4 | {"use_bidirectional_attention": "vision"}, ""),
    "texts both ways": (
        "poolers", "Gemma4TextModel",
        SIZES | GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "limits of time steps": (
        "poolers", "NemotronHModel",
        SIZES | {"layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
                 "n_groups": 2, "ssm_state_size": 8, "time_step_limit": [0.1, 1.0]}, "time_step_limit"),
    "Gemma's activation": ("decoders", "GemmaForCausalLM", SIZES | {"head_dim": 8, "hidden_act": "relu2"}, ""),
    "caps of scores that Gemma 3 has not": ("decoders", "Gemma3ForCausalLM",
                                            SIZES | {"head_dim": 8, "attn_logit_softcapping": 4.0}, "attn_logit_softcapping"),
    "no shared expert": ("latents", "DeepseekV3ForCausalLM", LATENT | {"n_shared_experts": 0}, ""),
    "no shared expert of GLM": (
        "mixtures", "Glm4MoeForCausalLM",
        SIZES | {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                 "n_shared_experts": 0, "first_k_dense_replace": 1}, ""),
    "an activation that experts have not": ("latents", "DeepseekV3ForCausalLM", LATENT | {"hidden_act": "quick_gelu"},
                                            "hidden_act"),
    "an activation behind convolutions": ("hybrids", "Qwen3_5ForCausalLM", DELTA | {"hidden_act": "gelu"}, "hidden_act"),
    "heads of an odd size where none rotate": (
        "hybrids", "JambaForCausalLM",
        SIZES | {"hidden_size": 36, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 4}, ""),
    "heads as wide as hidden states say": (
        "mixtures", "Qwen3MoeForCausalLM",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, ""),
    "windows in all layers": (
        "mixtures", "Qwen3MoeForCausalLM",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "use_sliding_window": True,
                 "sliding_window": 5, "max_window_layers": 1}, ""),
    "a bias of the output layer": (
        "mixtures", "Ernie4_5_MoeForCausalLM",
        SIZES | {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}, ""),
    "the least sum of weights": (
        "mixtures", "Ernie4_5_MoeForCausalLM",
        SIZES | {"moe_norm_min": 0.01, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}, "moe_norm_min"),
    "an activation by its own name": ("decoders", "GPT2LMHeadModel", _GPT | {"activation_function": "mish"},
                                      "activation_function"),
    "experts in no layer": (
        "mixtures", "Llama4ForCausalLM",
        SIZES | {"head_dim": 8, "num_local_experts": 4, "moe_layers": [], "intermediate_size_mlp": 24}, ""),
    "no layer with a window": (
        "mixtures", "Qwen2MoeForCausalLM",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                 "shared_expert_intermediate_size": 8, "use_sliding_window": True, "max_window_layers": 0}, ""),
    "an activation of Jamba's convolutions": (
        "hybrids", "JambaForCausalLM", SIZES | {"num_experts": 1, "hidden_act": "gelu"}, "hidden_act"),
    "an activation of Granite's convolutions": (
        "hybrids", "GraniteMoeHybridForCausalLM",
        SIZES | {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 16,
                 "mamba_d_state": 4, "num_local_experts": 0, "shared_intermediate_size": 24, "hidden_act": "relu2"},
        "hidden_act"),
    "slopes of six heads": (
        "hybrids", "MiniMaxForCausalLM",
        SIZES | {"num_attention_heads": 6, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16},
        ""),
    "an output layer that is not tied": (
        "hybrids", "NemotronHForCausalLM",
        SIZES | {"layers_block_type": ["full_attention", "mlp"], "head_dim": 8, "tie_word_embeddings": True},
        "tie_word_embeddings"),
    "heads of an odd size in Nemotron-H": (
        "hybrids", "NemotronHForCausalLM", SIZES | {"layers_block_type": ["full_attention", "mlp"], "head_dim": 9}, ""),
    "positions of MPNet": ("poolers", "MPNetModel", SIZES | {"pad_token_id": 0}, ""),
    "an output layer that DeBERTa's newer form has": ("poolers", "DebertaV2ForMaskedLM", SIZES | {"legacy": False}, ""),
    "an activation of a classifier": (
        "poolers", "ModernBertForTokenClassification", SIZES | {"num_labels": 2, "classifier_activation": "relu2"}, ""),
    "buckets of MPNet": ("poolers", "MPNetModel", SIZES | {"relative_attention_num_buckets": 40}, "num_buckets"),
    "a Gemma 2 that sees both ways": (
        "poolers", "Gemma2Model", SIZES | {"head_dim": 8, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "a bias of no shared expert": (
        "latents", "DeepseekV2ForCausalLM",
        LATENT | {"n_shared_experts": 0, "mlp_bias": True, "n_group": None, "topk_group": None}, "n_shared_experts"),
    "scores of DeBERTa without distances": ("poolers", "DebertaV2Model", SIZES | {"pos_att_type": ["c2p"]}, "pos_att_type"),
    "heads of NomicBERT": ("poolers", "NomicBertModel", SIZES | {"head_dim": 12}, "head_dim"),
    "a text model's own name": (
        "poolers", "Llama4TextModel",
        SIZES | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 64}, ""),
    "an encoder that sees one way": ("poolers", "BertModel", SIZES | {"is_decoder": True}, "is_decoder"),
    "a classifier by another name": ("poolers", "GPTNeoXForTokenClassification",
                                     SIZES | {"num_labels": 3, **_rope("default", partial_rotary_factor=0.5)}, ""),
    "a norm that nothing reads": ("poolers", "DebertaV2Model",
                                  SIZES | {"relative_attention": True, "share_att_key": True, "pos_att_type": ["c2p"]}, ""),
    "buckets beyond the longest distance": (
        "encoder-decoders", "T5ForConditionalGeneration",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4, "n_positions": 64,
         "relative_attention_num_buckets": 40, "relative_attention_max_distance": 20, "decoder_start_token_id": 3},
        "relative_attention_max_distance"),
    "embeddings that Whisper scales not": (
        "encoder-decoders", "WhisperForConditionalGeneration",
        {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "scale_embedding": True,
         "max_source_positions": 15, "max_target_positions": 96, "num_mel_bins": 5, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}, ""),
    "a band of one kind of layers": (
        "decoders", "Gemma3ForCausalLM",
        SIZES | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
                 "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "truncate": False,
                               "original_max_position_embeddings": 8},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}, "truncate"),
    "a bias of Longcat's router": (
        "latents", "LongcatFlashForCausalLM",
        SIZES | {"num_key_value_heads": 4, "num_layers": 1, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 8, "moe_topk": 2,
                 "n_routed_experts": 4, "zero_expert_num": 1, "q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
                 "qk_rope_head_dim": 4, "v_head_dim": 5, "head_dim": 4, "router_bias": True}, "router_bias"),
    "heads of another size where they share out hidden states": (
        "decoders", "GPTNeoXForCausalLM", SIZES | {"head_dim": 16, **_rope("default", partial_rotary_factor=0.5)}, "head_dim"),
    "feed-forward blocks without units": (
        "hybrids", "Lfm2ForCausalLM",
        SIZES | {"intermediate_size": 1, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"]},
        "intermediate_size"),
    "heads of Zamba's attention": (
        "hybrids", "Zamba2ForCausalLM",
        SIZES | {"num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 8,
                 "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 4, "adapter_rank": 4}, ""),
    "an activation that Nemotron-H has under another name": (
        "hybrids", "NemotronHForCausalLM",
        SIZES | {"layers_block_type": ["full_attention", "mlp"], "head_dim": 8, "hidden_act": "silu"}, ""),
    "an activation of Gemma 4's experts": (
        "mixtures", "Gemma4ForCausalLM",
        SIZES | GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
                          "hidden_activation": "quick_gelu"}, "hidden_activation"),
    "caps of logits where a tower stands before them": (
        "sighted", "LlavaForConditionalGeneration", CONFIGS["llava"][1] | {
            "text_config": {**CONFIGS["llava"][1]["text_config"], "model_type": "gemma2", "final_logit_softcapping": 4.0,
                            "query_pre_attn_scalar": 8}}, "final_logit_softcapping"),
    "a mask that InternVL's tower was trained with": (
        "pictured", "internvl", {"vision_config": {"use_mask_token": True}}, ""),
    "Ministral 3, whose queries grow with their position": (
        "decoders", "Ministral3ForCausalLM",
        SIZES | {"head_dim": 8, "sliding_window": 5, **_rope("yarn", factor=4.0, original_max_position_embeddings=8,
                                                             llama_4_scaling_beta=0.3, max_position_embeddings=96)}, ""),
}  # fmt: skip
"""What the walk found: group, architecture, fields, and the field it is refused for; "": it is equal."""


@pytest.mark.parametrize("name", FOUND)
def test_what_the_walk_found(name: str) -> None:
    group, architecture, fields, refused = FOUND[name]
    verdict = judge(group, architecture, 0, fields)
    assert verdict.outcome == (Outcome.REFUSED if refused else Outcome.EQUAL), verdict.detail
    assert refused in verdict.detail


STEPS = 6
"""Draws of each group that every run takes."""


@pytest.mark.parametrize("group", GROUPS)
def test_a_few_steps(group: str) -> None:
    """The same in every run, spread over the group's architectures."""
    names, rng, equal = members(group), random.Random(group), 0
    for seed in range(1000, 1000 + STEPS):
        verdict = walk(group, rng.choice(names), seed)
        assert not verdict.outcome.is_fault, verdict
        equal += verdict.outcome is Outcome.EQUAL
    assert equal, "nothing was compared"


@pytest.mark.soak
@pytest.mark.parametrize(("group", "architecture"), [(group, name) for group in GROUPS for name in members(group)])
def test_many_steps(group: str, architecture: str) -> None:
    found = [walk(group, architecture, seed) for seed in range(2000, 2010)]
    assert not [verdict for verdict in found if verdict.outcome.is_fault]


def test_a_small_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one logit, or of one token where logits are right."""
    fields = SIZES | {"head_dim": 8}
    assert judge("decoders", "LlamaForCausalLM", 0, fields).outcome is Outcome.EQUAL
    in_chunks = Machine.in_chunks

    def off(self: Machine, *arguments: Any) -> torch.Tensor:
        found = in_chunks(self, *arguments)
        found[20, 5] += 2e-3
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Machine, "in_chunks", off)
        assert judge("decoders", "LlamaForCausalLM", 0, fields).outcome is Outcome.DIFFERENT
    with monkeypatch.context() as patched:

        def other(*arguments: Any) -> Any:
            answers = run(*arguments)
            answers["1"].token_ids[3] ^= 1
            return answers

        patched.setattr("tests.models.walk.decoders.run_engine", other)
        verdict = judge("decoders", "LlamaForCausalLM", 0, fields)
        assert verdict.outcome is Outcome.DIFFERENT and "prompt 1" in verdict.detail


def test_a_difference_in_16_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tokens, in float16."""
    fields = SIZES | {"head_dim": 8}
    assert judge("halves", "LlamaForCausalLM", 1, fields).outcome is Outcome.EQUAL
    in_chunks = Machine.in_chunks

    def off(self: Machine, *arguments: Any) -> torch.Tensor:
        found = in_chunks(self, *arguments)
        return found + 0.1 * found.std() * torch.randn(found.shape, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr(Machine, "in_chunks", off)
    assert judge("halves", "LlamaForCausalLM", 1, fields).outcome is Outcome.DIFFERENT


def test_every_rule_is_of_use() -> None:
    """Each is the first that matches some family's field: none is dead."""
    used = set()
    for group in GROUPS:
        for architecture in members(group):
            if group in ("gguf", "pictured"):
                continue
            config_class = decoders.class_of(architecture)
            for name in own_fields(config_class):
                used.add(matches(name, standard_names(config_class, name)))
    assert {pattern for pattern, _ in RULES} <= used
