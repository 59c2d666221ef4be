"""Tiny random models with states, from transformers: the oracle. Each is saved, loaded by us, and run on one
sequence."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models.decoder import DecoderModel
from headway.models.load import load_model
from headway.weights import open_checkpoint
from tests.models.harness import DEVICE

LENGTH = 70
"""Tokens in the test sequence: more than a chunk."""
MAX_LEN = 80
VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Tiny:
    """A family of transformers and what its configuration changes."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    config_class: str = ""


_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2}
_DELTA: dict[str, Any] = _ATTENTION | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_ZAMBA: dict[str, Any] = _ATTENTION | {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"], "adapter_rank": 5,
    "n_mamba_heads": 8, "mamba_d_state": 6, "chunk_size": 16, "time_step_min": 1e-9,
}  # fmt: skip
HYBRIDS: dict[str, Tiny] = {
    "mamba": Tiny("Mamba", {"state_size": 5, "conv_kernel": 4}),
    "mamba-biases": Tiny("Mamba", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 7}),
    "falcon-mamba": Tiny("FalconMamba", {"state_size": 6, "tie_word_embeddings": False}),
    "mamba2": Tiny("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 16}),
    "mamba2-tied": Tiny(
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 7, "n_groups": 1, "use_bias": True, "use_conv_bias": False}
        | {"tie_word_embeddings": True},
    ),
    "falcon-h1": Tiny(
        "FalconH1",
        _ATTENTION
        | _MAMBA2
        | {"mamba_d_ssm": 64, "mamba_chunk_size": 16, "key_multiplier": 0.7, "attention_in_multiplier": 1.3}
        | {"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [1.4, 0.5], "lm_head_multiplier": 0.5}
        | {"embedding_multiplier": 2.0},
    ),
    "falcon-h1-norm": Tiny(
        "FalconH1", _ATTENTION | _MAMBA2 | {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": True}
    ),
    "jamba": Tiny(
        "Jamba",
        _ATTENTION
        | {
            "num_hidden_layers": 3,
            "num_experts": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 5,
        },
    ),
    "nemotron-h": Tiny(
        "NemotronH",
        _ATTENTION
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 8, "n_groups": 2}
        | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "chunk_size": 16, "num_hidden_layers": 4},
    ),
    "granite-hybrid": Tiny(
        "GraniteMoeHybrid",
        _ATTENTION
        | _MAMBA2
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
        }
        | {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
        | {"position_embedding_type": "rope"},
    ),
    "jamba-moe": Tiny(
        "Jamba",
        _ATTENTION
        | {
            "num_hidden_layers": 3,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 5,
        },
    ),
    "nemotron-h-moe": Tiny(
        "NemotronH",
        _ATTENTION
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "head_dim": 8,
            "n_groups": 2,
        }
        | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "chunk_size": 16, "num_hidden_layers": 5}
        | {"n_routed_experts": 8, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20, "n_group": 2}
        | {"routed_scaling_factor": 1.5, "num_experts_per_tok": 2, "moe_latent_size": 12},
    ),
    "nemotron-h-states-and-experts": Tiny(
        "NemotronH",
        _ATTENTION
        | {"layers_block_type": ["linear_attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
        | {"ssm_state_size": 6, "chunk_size": 16, "num_hidden_layers": 2, "n_routed_experts": 6}
        | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20},
    ),
    "granite-hybrid-moe": Tiny(
        "GraniteMoeHybrid",
        _ATTENTION
        | _MAMBA2
        | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"shared_intermediate_size": 40, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    ),
    "qwen3-next-moe": Tiny(
        "Qwen3Next",
        _DELTA
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        }
        | {"mlp_only_layers": [1]},
    ),
    "qwen3.5-moe": Tiny(
        "Qwen3_5Moe",
        _DELTA
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
        "Qwen3_5MoeTextConfig",
    ),
    "lfm2": Tiny(
        "Lfm2",
        _ATTENTION
        | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 8},
    ),
    "lfm2-moe": Tiny(
        "Lfm2Moe",
        _ATTENTION
        | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1}
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    ),
    "zamba2": Tiny(
        "Zamba2",
        _ZAMBA
        | {
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "mamba_ngroups": 2,
        },
    ),
    "zamba2-one-block": Tiny("Zamba2", _ZAMBA | {"add_bias_linear": True}),
    "minimax": Tiny(
        "MiniMax",
        _ATTENTION
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, "block_size": 16}
        | {"full_attn_alpha_factor": 1.3, "linear_attn_alpha_factor": 0.7, "mlp_alpha_factor": 1.1}
        | {"full_attn_beta_factor": 0.9, "linear_attn_beta_factor": 1.2, "mlp_beta_factor": 0.8},
    ),
    "kimi-linear": Tiny(
        "KimiLinear",
        _ATTENTION
        | {"num_key_value_heads": 4, "num_hidden_layers": 3, "linear_head_dim": 8, "linear_num_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "kv_lora_rank": 12}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_local_experts": 6, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "qwen3-next": Tiny("Qwen3Next", _DELTA | {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3.5": Tiny("Qwen3_5", _DELTA | {"attention_bias": True}, "Qwen3_5TextConfig"),
    "olmo-hybrid": Tiny(
        "OlmoHybrid",
        {name: value for name, value in _DELTA.items() if name != "head_dim"}
        | {"linear_num_key_heads": 4, "linear_value_head_dim": 8},  # transformers saves other sizes cut in three
    ),
}


@dataclass(frozen=True)
class Pair:
    """Our model and what transformers makes of one sequence: ``logits`` [LENGTH, V] of ``tokens``."""

    model: DecoderModel
    tokens: list[int]
    logits: torch.Tensor


def hf_model(case: Tiny) -> Any:
    """A random transformers model. Every weight counts: norms are not 1, biases not 0; decays are neither 0 nor 1."""
    import transformers

    config = getattr(transformers, case.config_class or f"{case.family}Config")(**_SIZES | case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        mean, spread = 0.0, 0.2
        if "norm" in name:
            mean = 1.0
        elif name.endswith("A_log"):
            mean, spread = -1.0, 1.0
        elif name.endswith((".D", "conv1d.weight")):
            mean, spread = 0.5, 0.5
        parameter.data.normal_(mean, spread, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.data.normal_(0.0, 0.2, generator=generator)
    return model


def save(name: str, folder: Path) -> Path:
    """The checkpoint of a case."""
    hf_model(HYBRIDS[name]).save_pretrained(folder)
    return folder


@functools.cache
def folder_of(name: str) -> Path:
    """Where the checkpoint of a case lies; written once per process."""
    return save(name, Path(tempfile.mkdtemp(prefix=f"headway-{name}-")))


def _norms_groups(oracle: Any) -> bool:
    """Whether its gated norms know groups, or have only one. transformers 5.17 forgot them in two of its models."""
    groups = getattr(oracle.config, "n_groups", None) or getattr(oracle.config, "mamba_n_groups", None) or 1
    norms = [module for module in oracle.modules() if type(module).__name__.endswith("RMSNormGated")]
    forgetful = type(oracle).__name__ in ("Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM")
    return groups == 1 or not forgetful or all(hasattr(norm, "group_size") for norm in norms)


@functools.cache
def pair(name: str) -> Pair:
    """The case in float32, built once, loaded through the real checkpoint reader."""
    oracle = hf_model(HYBRIDS[name])
    if not _norms_groups(oracle):
        pytest.skip(
            "this transformers normalises all groups of a Mamba-2 layer together; mamba_ssm and later ones do not"
        )
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    checkpoint = open_checkpoint(str(folder_of(name)))
    model = load_model(checkpoint, dtype=torch.float32, device=DEVICE, max_model_len=MAX_LEN, progress=False, seed=0)
    assert isinstance(model, DecoderModel)
    return Pair(model, tokens, logits)
