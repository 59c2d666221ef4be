"""What a config.json asks for and there is not is refused, by name: a case for every refusal of the readers."""

from __future__ import annotations

import ast
import contextlib
import random
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import pytest

from headway.core.errors import HeadwayError, UnsupportedModelError
from headway.models.registry import ARCHITECTURES, read_config
from tests.house.source import ROOT
from tests.models.test_defaults import NOT_THEIRS, families, generic, spelled_out

ELSEWHERE = ("config.py", "decoder.py", "fields.py", "purpose.py", "registry.py", "rope.py", "sharding.py")
"""Readers' files whose refusals have tests of their own: test_config, test_fields, test_rope, tests/api, tests/parallel."""
BERT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
"""Of encoders that transformers has not."""
GEMMA4: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

OUT: dict[str, Any] = {"out_hidden_size": 8192}
"""Of towers, that of the text models that stand for none."""

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("AlbertModel", {"inner_group_num": 2}, "inner_group_num = 2"),
    ("AlbertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ("BertModel", {"hidden_size": 50}, "hidden_size=50 is not a multiple of num_attention_heads=12"),
    ("BertForSequenceClassification", {"id2label": {"one": "a"}}, "id2label"),
    ("BertForSequenceClassification", {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh'"),
    ("DebertaV2Model", {"embedding_size": 8}, "embedding_size = 8"),
    ("DebertaV2Model", {"pos_att_type": ["c2p"]}, "pos_att_type"),
    ("DebertaV2Model", {"relative_attention": True, "pos_att_type": "c2p|p2p"}, "c2p and p2c are"),
    ("DebertaV2Model", {"relative_attention": True, "pos_att_type": "c2p", "share_att_key": False}, "share_att_key"),
    ("MPNetModel", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets = 16"),
    ("NomicBertModel", {"head_dim": 3}, "head_dim = 3"),
    ("NomicBertModel", {"prenorm": True}, "prenorm = True"),
    ("JinaEmbeddingsV3Model", {"lora_adaptations": ["a", "b", "a"]}, "lora_adaptations"),
    ("JinaEmbeddingsV3Model", {"lora_adaptations": "ab"}, "lora_adaptations"),
    ("JinaEmbeddingsV3Model", {"lora_adaptations": ["a", 3]}, "lora_adaptations"),
    ("JinaBertModel", {"position_embedding_type": "absolute"}, "'alibi' is"),
    # decoders
    ("GPTJForCausalLM", {"rotary_dim": 7}, "rotary_dim = 7"),
    ("GPTJForCausalLM", {"n_embd": 64, "n_head": 4, "rotary_dim": 18}, "rotary_dim = 18"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights"),
    *[("OPTForCausalLM", {name: False}, name) for name in (
        "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")],
    ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512"),
    ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    *[("MptForCausalLM", {"attn_config": {name: True}}, f"{name} = True in attn_config") for name in (
        "clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id")],
    ("MptForCausalLM", {"attn_config": {"alibi": False}}, "alibi = False in attn_config"),
    ("MptForCausalLM", {"no_bias": False}, "no_bias"),
    ("Exaone4ForCausalLM", {"layer_types": None, "sliding_window_pattern": "LLX"}, "sliding_window_pattern = 'LLX'"),
    ("Exaone4ForCausalLM", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ("Cohere2ForCausalLM", {"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers=40"),
    ("Cohere2ForCausalLM", {"position_embedding_type": "alibi"}, "'rope_gptj' is"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "for each of the 36 layers"),
    ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm = False"),
    ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla = True"),
    ("HunYuanDenseV1ForCausalLM", {"mlp_bias": True}, "mlp_bias = True"),
    ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling = 0"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 4.0}, "attn_logit_softcapping"),
    ("Gemma3nForCausalLM", {"altup_active_idx": 4}, "altup_active_idx = 4"),
    ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [1.0] * 35}, "activation_sparsity_pattern"),
    ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.5] * 3}, "3 entries, num_hidden_layers=35"),
    ("Gemma3nForCausalLM", {"intermediate_size": 8.5}, "intermediate_size"),
    ("Gemma4ForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("Gemma4ForCausalLM", {"per_layer_config": {"0": {"head_dim": 8, "sliding_window": 3}}}, "layer 0 has"),
    ("Gemma4ForCausalLM", {"num_kv_shared_layers": 30}, "num_kv_shared_layers = 30"),
    # mixtures
    ("GraniteMoeForCausalLM", {"num_local_experts": 0}, "num_local_experts = 0"),
    ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
    ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts = 0"),
    ("OlmoeForCausalLM", {"num_experts": 0, "num_local_experts": None}, "num_experts = 0"),
    ("Qwen3_5MoeForCausalLM", {"num_experts": 0, "num_local_experts": None}, "num_experts = 0"),
    ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
    ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2]}, "moe_topk = [1, 2]"),
    ("Ernie4_5_MoeForCausalLM", {"moe_use_aux_free": False}, "moe_use_aux_free"),
    ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.01}, "moe_norm_min = 0.01"),
    ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("Dots1ForCausalLM", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("GptOssForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "mxfp4 is"),
    ("GptOssForCausalLM", {"quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts"]}}, "leaves experts out"),
    ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}, "hidden_size": 96}, "hidden_size = 96"),
    ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 96},
     "intermediate_size = 96"),
    ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "must name 48 layers"),
    ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 48}, "'sliding_attention'"),
    ("Glm4MoeForCausalLM", {"head_dim": 128, "n_group": 3}, "n_group = 3"),
    ("Glm4MoeForCausalLM", {"head_dim": 128, "n_group": 8, "topk_group": 9}, "9 to be chosen from"),
    ("Glm4MoeForCausalLM", {"head_dim": 128, "n_group": 128, "topk_group": 1}, "n_group = 128"),
    ("Glm4MoeForCausalLM", {"head_dim": 128, "n_group": 64, "topk_group": 2}, "num_experts_per_tok = 8"),
    ("Qwen3MoeForCausalLM", {**MIXTURE, "hidden_act": "quick_gelu"}, "is not implemented in mixtures"),
    ("MiniMaxForCausalLM", {"attn_type_list": [1] * 32, "num_hidden_layers": 32}, "postnorm"),
    ("MiniMaxForCausalLM", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
    ("MiniMaxForCausalLM", {"sliding_window": 8}, "sliding_window = 8"),
    ("MiniMaxM2ForCausalLM", {"use_qk_norm": False}, "qk_norm_type"),
    ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    # latents
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": 64}, "num_key_value_heads = 64"),
    ("DeepseekV3ForCausalLM", {"mlp_layer_types": ["dense"] * 60}, "for each of 61 layers"),
    ("DeepseekV3ForCausalLM", {"mlp_layer_types": ["dense"] * 60 + ["wide"]}, "for each of 61 layers"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "mlp_bias": True, "n_shared_experts": 0}, "n_shared_experts = 0"),
    ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "beside an indexer"),
    ("DeepseekV32ForCausalLM", {"index_head_dim": 32}, "less than qk_rope_head_dim=64"),
    ("DeepseekV32ForCausalLM", {"layer_types": ["full_attention"] * 61}, "'full_attention'"),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["full"] * 3}, "indexer_types"),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared"] * 78}, "of the first 'full'"),
    ("GlmMoeDsaForCausalLM", {"indexer_types": ["full"] * 77 + ["none"]}, "indexer_types"),
    ("LongcatFlashForCausalLM", {"mla_scale_q_lora": False}, "mla_scale_q_lora"),
    ("LongcatFlashForCausalLM", {"router_bias": True}, "router_bias"),
    ("LongcatFlashForCausalLM", {"mla_scale_kv_lora": False}, "mla_scale_kv_lora"),
    ("LongcatFlashForCausalLM", {"zero_expert_type": "zero"}, "zero_expert_type = 'zero'"),
    ("LongcatFlashForCausalLM", {"q_lora_rank": None}, "q_lora_rank = None"),
    # states
    ("MambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("MambaForCausalLM", {"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype = 'float8'"),
    ("Mamba2ForCausalLM", {"time_step_limit": [1.0]}, "time_step_limit = [1.0]"),
    ("Mamba2ForCausalLM", {"time_step_limit": [0.5, 0.25]}, "must rise"),
    ("Mamba2ForCausalLM", {"time_step_limit": [-0.5, 0.25]}, "must rise"),
    ("Mamba2ForCausalLM", {"n_groups": 7}, "n_groups=7"),
    ("Mamba2ForCausalLM", {"expand": 3}, "expand = 3"),
    ("JambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 3}, "names 3 layers, num_hidden_layers=32"),
    ("Lfm2ForCausalLM", {"intermediate_size": 1, "block_auto_adjust_ff_dim": True, "block_multiple_of": 1},
     "feed-forward blocks without units"),
    ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 31 + ["gru"]}, "'gru'"),
    ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0] * 4}, "must be 5 numbers"),
    ("FalconH1ForCausalLM", {"mlp_multipliers": [1.0] * 3}, "must be 2 numbers"),
    *[("FalconH1ForCausalLM", {name: True}, name) for name in ("attention_bias", "mamba_proj_bias", "projectors_bias")],
    ("FalconH1ForCausalLM", {"mamba_n_heads": 48}, "mamba_n_heads = 48"),
    ("NemotronHForCausalLM", {"layers_block_type": ["mamba", "gru"]}, "'gru'"),
    ("NemotronHForCausalLM", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    ("NemotronHForCausalLM", {"layers_block_type": ["moe"], "mlp_hidden_act": "quick_gelu"}, "in mixtures"),
    ("NemotronHForCausalLM", {"num_hidden_layers": 3, "layers_block_type": ["mamba"] * 4}, "must be 4"),
    ("NemotronHForCausalLM", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
    ("NemotronHForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("Zamba2ForCausalLM", {"use_long_context": True}, "use_long_context"),
    ("Zamba2ForCausalLM", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("Zamba2ForCausalLM", {"layers_block_type": ["mamba"] * 54}, "'hybrid' for one"),
    ("Qwen3NextForCausalLM", {"linear_num_value_heads": 40, "linear_num_key_heads": 16}, "linear_num_value_heads = 40"),
    ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
    ("KimiLinearForCausalLM", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    # encoders and decoders
    ("T5ForConditionalGeneration", {"relative_attention_num_buckets": 3}, "relative_attention_max_distance"),
    ("T5ForConditionalGeneration", {"relative_attention_max_distance": 16}, "more than half of 32 buckets"),
    ("BartForConditionalGeneration", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("BartForConditionalGeneration", {"normalize_before": True}, "normalize_before"),
    ("MBartForConditionalGeneration", {"add_final_layer_norm": False}, "add_final_layer_norm"),
    ("BartForConditionalGeneration", {"encoder_attention_heads": 15}, "encoder_attention_heads = 15"),
    ("WhisperForConditionalGeneration", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("WhisperForConditionalGeneration", {"decoder_attention_heads": 5}, "decoder_attention_heads = 5"),
    ("WhisperForConditionalGeneration", {"encoder_attention_heads": 5}, "encoder_attention_heads = 5"),
    # sight and hearing
    ("Idefics3ForConditionalGeneration", {"vision_config": {"image_size": 96, "patch_size": 32}}, "has 3^2 patches"),
    ("LlavaForConditionalGeneration", {"text_config": {"model_type": "bloom"}}, "text_config.model_type = 'bloom'"),
    ("LlavaForConditionalGeneration", {"vision_config": None}, "vision_config = None"),
    ("LlavaForConditionalGeneration", {"vision_feature_select_strategy": "full"}, "'clip_vision_model'"),
    ("LlavaForConditionalGeneration", {"vision_feature_layer": 0}, "vision_feature_layer = 0"),
    ("LlavaForConditionalGeneration", {"vision_feature_layer": [1, 2]}, "vision_feature_layer"),
    ("LlavaForConditionalGeneration", {"vision_config": {"image_size": [30, 20]}}, "image_size"),
    ("Gemma3ForConditionalGeneration",
     {"mm_tokens_per_image": 256, "text_config": {"final_logit_softcapping": 3.0}}, "final_logit_softcapping = 3"),
    ("Gemma3ForConditionalGeneration", {"mm_tokens_per_image": 25}, "mm_tokens_per_image = 25"),
    ("Qwen2VLForConditionalGeneration", {"vision_config": {"hidden_size": 9}}, "hidden_size = 9 must be the text model's"),
    ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"out_hidden_size": 9}}, "out_hidden_size = 9"),
    ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"window_size": 27}}, "window_size = 27"),
    ("Qwen2VLForConditionalGeneration",
     {"text_config": {"rope_parameters": {"mrope_interleaved": 3}}}, "mrope_interleaved = 3"),
    ("Qwen2VLForConditionalGeneration", {"text_config": {"rope_parameters": {"mrope_section": [1, 2]}}}, "(1, 2)"),
    ("Qwen2VLForConditionalGeneration",
     {"text_config": {"rope_parameters": {"mrope_section": [1, 2, 3]}}}, "does not add up to half a head"),
    ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"fullatt_block_indexes": None} | OUT}, "fullatt_block_indexes"),
    ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"fullatt_block_indexes": [-1]} | OUT}, "fullatt_block_indexes"),
    ("Qwen3VLForConditionalGeneration", {"vision_config": {"num_position_embeddings": 50}}, "is not a square"),
    ("Qwen3VLForConditionalGeneration",
     {"vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [*range(33)]}}, "more layers than the decoder"),
    ("InternVLForConditionalGeneration", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
    ("InternVLForConditionalGeneration", {"vision_config": {"use_qk_norm": True}}, "use_qk_norm"),
    ("InternVLForConditionalGeneration", {"vision_config": {"norm_type": "rms_norm"}}, "norm_type"),
    ("InternVLForConditionalGeneration",
     {"vision_config": {"use_absolute_position_embeddings": False}}, "use_absolute_position_embeddings"),
    ("Mistral3ForConditionalGeneration",
     {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "axial rotation is"),
    ("Gemma4ForConditionalGeneration", GEMMA4 | {"vision_config": {"num_key_value_heads": 3}}, "num_key_value_heads = 3"),
    ("Gemma4ForConditionalGeneration", GEMMA4 | {"vision_config": {"head_dim": 3}}, "head_dim = 3"),
    ("Gemma4ForConditionalGeneration", GEMMA4 | {"vision_config": {"attention_bias": True}}, "attention_bias = True"),
    ("Gemma4ForConditionalGeneration", GEMMA4 | {"text_config": {"use_bidirectional_attention": "all"}}, "'vision' is"),
    *[("Gemma4ForConditionalGeneration", GEMMA4 | {"audio_config": config}, text) for config, text in (
        ({"num_attention_heads": 7}, "num_attention_heads = 7"),
        ({"hidden_size": 9, "num_attention_heads": 3}, "which must be even"),
        ({"subsampling_conv_channels": [8]}, "subsampling_conv_channels"),
        ({"subsampling_conv_channels": [6, 8]}, "a multiple of 4"),
        ({"attention_context_left": 1}, "attention_context_left = 1"))],
    *[("Gemma3nForConditionalGeneration", {"audio_config": config}, text) for config, text in (
        ({"vocab_size": 3}, "has no word for the text model's last id"),
        ({"sscp_conv_kernel_size": [[3, 3], [5, 3]]}, "sscp_conv_kernel_size"),
        ({"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size"),
        ({"conf_num_attention_heads": 7}, "conf_num_attention_heads = 7"),
        ({"hidden_size": 9, "conf_num_attention_heads": 3}, "which must be even"),
        ({"sscp_conv_channel_size": [8]}, "must be two numbers"))],
    *[("Gemma3nForConditionalGeneration", {"vision_config": config}, text) for config, text in (
        ({"architecture": "mobilenetv5_base"}, "architecture = 'mobilenetv5_base'"),
        ({"model_args": {"depth": 3}}, "'channel_multiplier' is"),
        ({"model_args": 3}, "model_args = 3"),
        ({"hidden_size": 2047}, "hidden_size = 2047"),
        ({"image_size": 600}, "image_size a multiple of 256"))],
    ("Gemma3nForConditionalGeneration", {"vision_soft_tokens_per_image": 100}, "256 is"),
]  # fmt: skip


def changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with ``changes``, those of nested objects in these."""
    found = dict(given)
    for name, value in changes.items():
        own = found.get(name)
        found[name] = changed(own, value) if isinstance(value, dict) and isinstance(own, dict) else value
    return found


def asked(architecture: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    given = spelled_out(architecture) if architecture in families() else BERT | {"architectures": [architecture]}
    return changed(given, changes)


def refusal(architecture: str, changes: Mapping[str, Any]) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(asked(architecture, changes))
    return caught.value


@pytest.mark.parametrize(("architecture", "changes", "text"), CASES)
def test_what_is_not_implemented_is_refused(architecture: str, changes: dict[str, Any], text: str) -> None:
    assert text in str(refusal(architecture, changes))


def raised_at(error: BaseException) -> Iterator[tuple[str, int]]:
    """File and line of each frame that an error came through."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def refusals() -> dict[tuple[str, int], str]:
    """Of the readers: the lines of each ``raise``, by file and line, as text."""
    found: dict[tuple[str, int], str] = {}
    top = ROOT / "headway" / "models"
    for path in [*sorted(top.glob("*.py")), top / "vision" / "families.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.name not in ELSEWHERE else ():
            text = ast.unparse(node) if isinstance(node, ast.Raise) else ""
            if "refuse(" in text or "UnsupportedModelError(" in text:
                found[str(path), node.lineno] = text  # type: ignore[attr-defined]
    return found


def test_every_refusal_has_a_case() -> None:
    missing = refusals()
    assert len(missing) > 100
    for architecture, changes, _ in CASES:
        for place in raised_at(refusal(architecture, changes)):
            missing.pop(place, None)
    assert not missing, "add cases: " + "\n".join(missing.values())


SHAPES: tuple[Any, ...] = ("x", -1, 0, 1.5, [1], {"a": 1}, None, [], True)
"""What JSON can hold where something else is meant."""


def places(given: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Fields of a family's own, and those of objects in it."""
    for name, value in given.items():
        if name not in generic() or name == "tie_word_embeddings":
            yield (name,)
        for inner in value if isinstance(value, dict) and name not in generic() else ():
            yield name, inner


def read_anything(architecture: str, path: tuple[str, ...], value: Any) -> None:
    given = spelled_out(architecture)
    wrong = {path[0]: value} if len(path) == 1 else {path[0]: given[path[0]] | {path[1]: value}}
    with contextlib.suppress(HeadwayError):
        read_config(given | wrong)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in NOT_THEIRS])
def test_whatever_a_field_holds_it_is_read_or_refused(architecture: str) -> None:
    """No traceback: one shape of each field, in every run the same."""
    rng = random.Random(architecture)
    for path in places(spelled_out(architecture)):
        read_anything(architecture, path, rng.choice(SHAPES))


@pytest.mark.soak
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in NOT_THEIRS])
def test_all_shapes(architecture: str) -> None:
    for path in places(spelled_out(architecture)):
        for value in SHAPES:
            read_anything(architecture, path, value)
