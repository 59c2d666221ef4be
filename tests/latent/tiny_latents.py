"""Tiny random models with latent attention, from transformers: the oracle. Each is saved, loaded by us, and run on one
sequence."""

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

LENGTH = 70
"""Tokens in the test sequence."""
MAX_LEN = 80
VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-4,
}


@dataclass(frozen=True)
class Tiny:
    """A family of transformers and what its configuration changes."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)


_DENSE: dict[str, Any] = {"first_k_dense_replace": 3}
_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 1}
_YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.9, "mscale_all_dim": 0.7,
    }
}  # fmt: skip
_INDEX: dict[str, Any] = {
    "mlp_layer_types": ["dense"] * 3, "q_lora_rank": 24, "index_topk": 9, "index_n_heads": 32, "index_head_dim": 12,
}  # fmt: skip
"""Many heads: with few, rectified scores of many tokens are zero, and transformers breaks ties at random."""
LATENTS: dict[str, Tiny] = {
    "v3.2": Tiny("DeepseekV32", _INDEX),
    "v3.2-yarn-biases": Tiny("DeepseekV32", _INDEX | _YARN | {"attention_bias": True, "index_topk": 30}),
    "glm-dsa": Tiny("GlmMoeDsa", _INDEX),
    "glm-dsa-shared": Tiny(
        "GlmMoeDsa",
        _INDEX | {"num_hidden_layers": 5, "mlp_layer_types": ["dense"] * 5}
        | {"indexer_types": ["full", "shared", "full", "shared", "shared"], "first_k_dense_replace": 5},
    ),
    "v3.2-experts": Tiny(
        "DeepseekV32",
        _INDEX | _EXPERTS
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
    ),
    "v2-lite": Tiny("DeepseekV2", _DENSE | {"q_lora_rank": None}),
    "v2-biases-yarn": Tiny(
        "DeepseekV2", _DENSE | _YARN | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}
    ),
    "v3-yarn": Tiny("DeepseekV3", _DENSE | _YARN | {"q_lora_rank": 24}),
    "v3-apart": Tiny("DeepseekV3", _DENSE | {"q_lora_rank": 24, "rope_interleave": False, "attention_bias": True}),
    "glm-4-moe-lite": Tiny(
        "Glm4MoeLite", {"mlp_layer_types": ["dense"] * 3, "q_lora_rank": 18, "v_head_dim": 14, "num_attention_heads": 5}
        | {"num_key_value_heads": 5}
    ),
    "v2-experts": Tiny(
        "DeepseekV2",
        _EXPERTS | {"first_k_dense_replace": 1, "q_lora_rank": None, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "v2-groups": Tiny(
        "DeepseekV2",
        _EXPERTS
        | {"first_k_dense_replace": 1, "q_lora_rank": 16, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    ),
    "v3-experts": Tiny(
        "DeepseekV3",
        _EXPERTS
        | {"first_k_dense_replace": 1, "q_lora_rank": 16, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
    ),
    "glm-4-moe-lite-experts": Tiny(
        "Glm4MoeLite",
        _EXPERTS | {"q_lora_rank": 18, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2},
    ),
    "longcat": Tiny(
        "LongcatFlash",
        {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 16, "moe_topk": 4}
        | {"n_routed_experts": 5, "zero_expert_num": 3, "q_lora_rank": 16, "head_dim": 8, "routed_scaling_factor": 1.5},
    ),
    "youtu": Tiny("Youtu", {"q_lora_rank": 24}),
    "minicpm3": Tiny("MiniCPM3", {"q_lora_rank": 24, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 24}),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Our model and what transformers makes of one sequence: ``logits`` [LENGTH, V] of ``tokens``."""

    model: DecoderModel
    tokens: list[int]
    logits: torch.Tensor


def hf_model(case: Tiny) -> Any:
    """A random transformers model. Every weight counts: norms are not 1, biases not 0."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**_SIZES | case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.state_dict().items():
        if weight.is_floating_point():
            mean = 1.0 if "norm" in name and not name.endswith("bias") else 0.0
            weight.normal_(mean, 0.25, generator=generator)
    return model


@functools.cache
def folder_of(name: str) -> Path:
    """Where the checkpoint of a case lies; written once per process."""
    folder = Path(tempfile.mkdtemp(prefix=f"headway-{name}-"))
    hf_model(LATENTS[name]).save_pretrained(folder)
    return folder


def ours(name: str, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """The case, loaded through the real checkpoint reader."""
    checkpoint = open_checkpoint(str(folder_of(name)))
    model = load_model(checkpoint, dtype=dtype, device=DEVICE, max_model_len=MAX_LEN, progress=False, seed=0)
    assert isinstance(model, DecoderModel)
    return model


@functools.cache
def pair(name: str) -> Pair:
    """The case in float32, built once."""
    oracle = hf_model(LATENTS[name])
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    return Pair(ours(name), tokens, logits)
