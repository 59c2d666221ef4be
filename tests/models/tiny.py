"""Tiny random transformers models, saved as checkpoints: the oracle of the model tests."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.models.decoder import DecoderModel
from headway.models.load import load_model
from headway.weights import open_checkpoint
from tests.models.harness import DEVICE

LENGTH = 26
"""Tokens in the test sequences."""
MAX_LEN = 32

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


ABSENT = "absent"
"""In place of one of these, for a family that has no such field."""


@dataclass(frozen=True)
class Tiny:
    """One oddity: a transformers family and what its configuration changes."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    shards: int = 1
    model: str = ""
    """Family of the model where its configuration is another's."""
    attention: str = "eager"
    """Transformers' way of attending: Falcon's eager one adds ALiBi twice."""


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16}
_WHOLE: dict[str, Any] = {"head_dim": ABSENT}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
}
_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "altup_num_inputs": 3,
}
TINY: dict[str, Tiny] = {
    "llama": Tiny("Llama"),
    "llama-tied-sharded": Tiny("Llama", {"tie_word_embeddings": True, "vocab_size": 131}, shards=3),
    "llama-biases": Tiny("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": Tiny("Llama", {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 5}),
    "llama-no-grouping": Tiny("Llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "llama-theta": Tiny("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": Tiny("Llama", _rope("linear", factor=2.5)),
    "llama-dynamic": Tiny("Llama", _rope("dynamic", factor=2.0)),
    "llama-llama3": Tiny(
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-yarn": Tiny("Llama", _rope("yarn", **_YARN)),
    "llama-yarn-mscale": Tiny("Llama", _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=0.5, truncate=False)),
    "llama-yarn-attention": Tiny("Llama", _rope("yarn", **_YARN, attention_factor=1.7, beta_fast=4.0, beta_slow=0.5)),
    "llama-longrope": Tiny(
        "Llama",
        _rope(
            "longrope",
            short_factor=[1.0 + 0.1 * i for i in range(10)],
            long_factor=[2.0 + 0.5 * i for i in range(10)],
            factor=4.0,
            original_max_position_embeddings=40,
        ),
    ),
    "mistral": Tiny("Mistral", {"sliding_window": None}),
    "mistral-window": Tiny("Mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-upper-window": Tiny(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen2-layer-types": Tiny(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": Tiny("Qwen3", {"tie_word_embeddings": True, "vocab_size": 131}),
    "qwen3-bias-window": Tiny(
        "Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "qwen3-moe": Tiny("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-some-dense": Tiny(
        "Qwen3Moe", _EXPERTS | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ),
    "qwen2-moe": Tiny(
        "Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 10}
    ),
    "qwen2-moe-plain": Tiny(
        "Qwen2Moe",
        _EXPERTS
        | {"shared_expert_intermediate_size": 32, "head_dim": 10, "num_hidden_layers": 4, "decoder_sparse_step": 2}
        | {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "mixtral-window": Tiny("Mixtral", {"num_local_experts": 4, "sliding_window": 7, "hidden_act": "gelu"}),
    "olmoe": Tiny("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "head_dim": 10}),
    "olmoe-normed": Tiny("Olmoe", {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 10}),
    "granite-moe": Tiny(
        "GraniteMoe",
        {"num_local_experts": 5, "head_dim": 10, "attention_multiplier": 0.21, "residual_multiplier": 0.3}
        | {"embedding_multiplier": 5.0, "logits_scaling": 0.4},
    ),
    "gpt-oss": Tiny(
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "swiglu_limit": 1.5,
        },
    ),
    "gpt-oss-one-kind": Tiny(
        "GptOss",
        {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "num_experts_per_tok": 4, "swiglu_alpha": 0.9}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "attention_bias": False},
    ),
    "llama4": Tiny(
        "Llama4Text",
        {"num_local_experts": 4, "intermediate_size_mlp": 48, "num_hidden_layers": 4, "attention_chunk_size": 8}
        | {"floor_scale": 5, "attn_scale": 0.4, "interleave_moe_layer_step": 2},
        model="Llama4",
    ),
    "llama4-two-experts": Tiny(
        "Llama4Text",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 48, "num_hidden_layers": 3}
        | {
            "no_rope_layers": [1, 0, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_chunk_size": 6,
        }
        | {"layer_types": ["chunked_attention", "full_attention", "full_attention"], "moe_layers": [0, 2]},
        model="Llama4",
    ),
    "glm4-moe": Tiny(
        "Glm4Moe",
        {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}
        | {"num_hidden_layers": 3},
    ),
    "glm4-moe-one-group": Tiny(
        "Glm4Moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
    ),
    "dots1": Tiny(
        "Dots1",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
    ),
    "ernie": Tiny("Ernie4_5", {"use_bias": True}),
    "ernie-moe": Tiny(
        "Ernie4_5_Moe",
        _WHOLE | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "exaone-moe": Tiny(
        "ExaoneMoe",
        {
            "head_dim": 10,
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "helium": Tiny("Helium", {"head_dim": 10, "pad_token_id": 0}),
    "solar-open": Tiny(
        "SolarOpen",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": ABSENT},
    ),
    "hunyuan": Tiny(
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe": Tiny("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2}),
    "flex-olmo": Tiny("FlexOlmo", _WHOLE | {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "granite-moe-shared": Tiny(
        "GraniteMoeShared",
        {"num_local_experts": 5, "head_dim": 10, "attention_multiplier": 0.21, "shared_intermediate_size": 24},
    ),
    "minimax-m2": Tiny(
        "MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3} | _rope("default", partial_rotary_factor=0.5)
    ),
    "phimoe": Tiny(
        "Phimoe",
        _WHOLE
        | {"num_local_experts": 7, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}
        | {"sliding_window": 9},
    ),
    "phimoe-longrope": Tiny(
        "Phimoe",
        _WHOLE
        | _rope(
            "longrope",
            short_factor=[1.0 + 0.1 * i for i in range(5)],
            long_factor=[2.0] * 5,
            short_mscale=1.2,
            long_mscale=1.3,
            original_max_position_embeddings=40,
        ),
    ),
    "gemma": Tiny("Gemma"),
    "gemma2": Tiny("Gemma2", {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 7}),
    "gemma2-no-caps": Tiny("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": Tiny(
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
            "final_logit_softcapping": 3.0,
        },
        model="Gemma3",
    ),
    "gemma4": Tiny("Gemma4Text", _GEMMA4, model="Gemma4"),
    "gemma4-shared": Tiny(
        "Gemma4Text",
        _GEMMA4 | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True},
        model="Gemma4",
    ),
    "gemma4-keys-are-values": Tiny(
        "Gemma4Text",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
        model="Gemma4",
    ),
    "gemma4-moe": Tiny(
        "Gemma4Text",
        _GEMMA4
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True}
        | {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 8},
        model="Gemma4",
    ),
    "gemma3n": Tiny("Gemma3nText", _GEMMA3N, model="Gemma3n"),
    "gemma3n-shared": Tiny(
        "Gemma3nText",
        _GEMMA3N
        | {
            "num_kv_shared_layers": 3,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.7, 0.0, 0.0],
            "altup_active_idx": 1,
        },
        model="Gemma3n",
    ),
    "bloom": Tiny("Bloom", _WHOLE | {"n_layer": 2, "n_head": 4}),
    "bloom-six-heads": Tiny("Bloom", _WHOLE | {"n_layer": 2, "n_head": 6, "hidden_size": 36}),
    "mpt": Tiny("Mpt", _WHOLE | {"d_model": 40, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "mpt-five-heads": Tiny(
        "Mpt",
        _WHOLE | {"d_model": 40, "n_heads": 5, "n_layers": 2} | {"attn_config": {"softmax_scale": 0.2}},
    ),
    "falcon-rw": Tiny(
        "Falcon",
        _WHOLE | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 72},
        attention="sdpa",
    ),
    "falcon-7b": Tiny("Falcon", _WHOLE | {"num_hidden_layers": 2}),
    "falcon-40b": Tiny("Falcon", _WHOLE | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Tiny(
        "Falcon", _WHOLE | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "gpt-neox": Tiny("GPTNeoX", _WHOLE | _rope("default", partial_rotary_factor=0.4)),
    "gpt-neox-in-turn": Tiny(
        "GPTNeoX", _WHOLE | {"use_parallel_residual": False} | _rope("default", partial_rotary_factor=1.0)
    ),
    "gptj": Tiny("GPTJ", _WHOLE | {"n_embd": 40, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 6}),
    "gpt2": Tiny("GPT2", _WHOLE | {"n_embd": 40, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "gpt2-by-layer": Tiny(
        "GPT2",
        _WHOLE
        | {"n_embd": 40, "n_head": 5, "n_layer": 2, "n_positions": 64, "n_inner": 72}
        | {"scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt-bigcode": Tiny("GPTBigCode", _WHOLE | {"n_embd": 40, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "gpt-bigcode-heads": Tiny(
        "GPTBigCode", _WHOLE | {"n_embd": 40, "n_head": 4, "n_layer": 2, "n_positions": 64, "multi_query": False}
    ),
    "opt": Tiny("OPT", _WHOLE | {"ffn_dim": 72, "word_embed_proj_dim": 40, "pad_token_id": 0}),
    "phi": Tiny("Phi", _WHOLE | _rope("default", partial_rotary_factor=0.4)),
    "stablelm": Tiny("StableLm", _WHOLE | {"use_qkv_bias": True} | _rope("default", partial_rotary_factor=0.4)),
    "stablelm-parallel": Tiny(
        "StableLm", _WHOLE | {"use_parallel_residual": True} | _rope("default", partial_rotary_factor=1.0)
    ),
    "starcoder2": Tiny("Starcoder2", _WHOLE | {"sliding_window": 6}),
    "starcoder2-no-bias": Tiny("Starcoder2", _WHOLE | {"use_bias": False, "num_key_value_heads": 4}),
    "phi3": Tiny("Phi3", {"pad_token_id": 0, "head_dim": 10}),
    "phi3-partial-window": Tiny(
        "Phi3", {"pad_token_id": 0, "head_dim": 10, "sliding_window": 6, **_rope("default", partial_rotary_factor=0.4)}
    ),
    "olmo2": Tiny("Olmo2", {"head_dim": 10, "attention_bias": True}),
    "olmo3": Tiny("Olmo3", {"head_dim": 10, "num_hidden_layers": 5, "sliding_window": 6}),
    "olmo3-yarn": Tiny(
        "Olmo3",
        {
            "head_dim": 10,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 3000.0, **_YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
    "granite": Tiny(
        "Granite",
        {
            "head_dim": 10,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.3,
            "embedding_multiplier": 5.0,
            "logits_scaling": 0.4,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "glm": Tiny("Glm", {"pad_token_id": 0} | _rope("default", partial_rotary_factor=0.5)),
    "glm4": Tiny("Glm4", {"pad_token_id": 0} | _rope("default", partial_rotary_factor=0.5)),
    "smollm3": Tiny(
        "SmolLM3", {"head_dim": 10, "num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}
    ),
    "smollm3-window": Tiny(
        "SmolLM3",
        {
            "head_dim": 10,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": 0,
        },
    ),
    "cohere": Tiny("Cohere", {"head_dim": 10, "logit_scale": 0.5}),
    "cohere2": Tiny("Cohere2", {"num_hidden_layers": 5, "head_dim": 10, "sliding_window": 6, "attention_bias": True}),
    "exaone4": Tiny("Exaone4", {"head_dim": 10, "num_hidden_layers": 5, "sliding_window": 6}),
    "exaone4-full": Tiny("Exaone4", {"head_dim": 10, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ministral": Tiny(
        "Ministral",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    ),
    "ministral3": Tiny("Ministral3", _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
    "arcee": Tiny("Arcee", {"mlp_bias": True}),
    "seed-oss": Tiny("SeedOss", {"attention_out_bias": True}),
}


@dataclass(frozen=True)
class Pair:
    """Our model and what transformers makes of one sequence: ``logits`` [LENGTH, V] of ``tokens``."""

    model: DecoderModel
    tokens: list[int]
    logits: torch.Tensor


def hf_model(case: Tiny) -> Any:
    """A random transformers model. Every weight counts: norms are not 1, biases not 0."""
    import transformers

    sizes = {name: value for name, value in (_SIZES | case.config).items() if value != ABSENT}
    config = getattr(transformers, f"{case.family}Config")(**sizes)
    config._attn_implementation = case.attention
    family = case.model or case.family
    named = next(each for each in (f"{family}ForCausalLM", f"{family}LMHeadModel") if hasattr(transformers, each))
    model = getattr(transformers, named)(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(mean, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of a router: what is saved, though it is no parameter
            buffer.data.normal_(0.0, 0.2, generator=generator)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)
    return model


def save(model: Any, folder: Path, shards: int = 1) -> Path:
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 1)
    return folder


@functools.cache
def pair(name: str) -> Pair:
    """The case in float32, built once, loaded through the real checkpoint reader."""
    case = TINY[name]
    oracle = hf_model(case)
    tokens = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens])).logits[0]
    return Pair(ours(oracle, case.shards), tokens, logits)


def ours(oracle: Any, shards: int = 1, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """A transformers model, saved and loaded by us."""
    with tempfile.TemporaryDirectory() as folder:
        save(oracle, Path(folder), shards)
        assert len(list(Path(folder).glob("*.safetensors"))) >= shards
        checkpoint = open_checkpoint(folder)
        model = load_model(checkpoint, dtype=dtype, device=DEVICE, max_model_len=MAX_LEN, progress=False, seed=0)
        assert isinstance(model, DecoderModel)
        return model
