"""Configurations as they were released, with other names than transformers writes: what is not honoured is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.errors import UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.layers.kimi_delta import KimiDeltaSpec
from headway.models.layers.lightning import LightningSpec
from headway.models.layers.mla import MLASpec
from headway.models.layers.moe import MixtureSpec
from headway.models.longcat import ShortcutBlockSpec
from headway.models.minimax import WeighedBlockSpec
from headway.models.registry import read_config
from headway.models.zamba2 import Zamba2Config

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
RELEASED: dict[str, dict[str, Any]] = {
    "MiniMaxM1ForCausalLM": {
        "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1], "postnorm": True, "head_dim": 16, "rotary_dim": 8,
        "layernorm_full_attention_alpha": 3.5, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 2.5,
        "layernorm_mlp_alpha": 1.5, "num_local_experts": 4, "shared_intermediate_size": 0, "rope_theta": 10000000,
    },
    "MiniMaxM2ForCausalLM": {
        "num_hidden_layers": 2, "attn_type_list": [1, 1], "head_dim": 16, "rotary_dim": 8, "use_qk_norm": True,
        "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
    },
    "KimiLinearForCausalLM": LATENT | {
        "num_hidden_layers": 4, "head_dim": 72, "model_max_length": 256, "q_lora_rank": None, "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
        "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1,
        "moe_intermediate_size": 24, "routed_scaling_factor": 2.446, "use_grouped_topk": True,
    },
    "LongcatFlashForCausalLM": LATENT | {
        "num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "moe_topk": 3, "n_routed_experts": 4,
        "zero_expert_num": 2, "zero_expert_type": "identity", "q_lora_rank": 16, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "router_bias": False, "routed_scaling_factor": 6.0, "attention_method": "MLA",
    },
    "PhiMoEForCausalLM": {
        "num_hidden_layers": 2, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": 64,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.25, "long_mscale": 1.5,
            "original_max_position_embeddings": 64,
        },
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 2,
        "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "use_mem_rope": True, "use_long_context": False,
        "use_shared_mlp_adapter": True, "adapter_rank": 4, "time_step_limit": None, "attention_head_dim": 32,
    },
}  # fmt: skip
REFUSED = [
    ("MiniMaxM1ForCausalLM", {"postnorm": False}, "postnorm"),
    ("MiniMaxM1ForCausalLM", {"shared_intermediate_size": 16}, "shared_intermediate_size"),
    ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
    ("KimiLinearForCausalLM", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ("LongcatFlashForCausalLM", {"zero_expert_type": "constant"}, "zero_expert_type"),
    ("LongcatFlashForCausalLM", {"mla_scale_q_lora": False}, "mla_scale_q_lora"),
    ("PhiMoEForCausalLM", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ("Zamba2ForCausalLM", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("Zamba2ForCausalLM", {"use_long_context": True}, "use_long_context"),
    ("Zamba2ForCausalLM", {"layers_block_type": ["mamba"] * 4}, "layers_block_type"),
]


def read(name: str, **changes: Any) -> DecoderConfig:
    found = read_config({"architectures": [name]} | BASE | RELEASED[name] | changes)
    assert isinstance(found, DecoderConfig)
    return found


def test_minimax() -> None:
    config = read("MiniMaxM1ForCausalLM")
    kinds = [type(block.mixer) is LightningSpec for block in config.blocks]
    assert kinds == [True, True, True, False]
    blocks = [block for block in config.blocks if isinstance(block, WeighedBlockSpec)]
    assert [block.mixed for block in blocks] == [(2.5, 1.0)] * 3 + [(3.5, 1.0)] and blocks[0].fed == (1.5, 1.0)
    first, third = (block.mixer for block in blocks[::2])
    assert isinstance(first, LightningSpec) and isinstance(third, LightningSpec)
    assert first == third, "they launch the same kernels"
    assert third.slopes[0] == pytest.approx(first.slopes[0] / 3, rel=1e-3)
    rope = config.blocks[3].attention.rope
    assert rope is not None and (rope.rotary_dim, rope.theta) == (8, 1e7)
    m2 = read("MiniMaxM2ForCausalLM").blocks[0]
    assert m2.attention.qk_norm == "all" and m2.attention.rope is not None and m2.attention.rope.rotary_dim == 8


def test_kimi_linear() -> None:
    config = read("KimiLinearForCausalLM")
    assert [type(block.mixer) for block in config.blocks] == [KimiDeltaSpec] * 3 + [MLASpec]
    assert [type(block.ffn) is MixtureSpec for block in config.blocks] == [False, True, True, True]
    latent, mixture = config.blocks[3].mixer, config.blocks[1].ffn
    assert isinstance(latent, MLASpec) and latent.rope is None and latent.scale == pytest.approx(12**-0.5)
    assert isinstance(mixture, MixtureSpec) and mixture.router.top_k == 2 and mixture.router.renormalise
    assert config.longest_context == 256


def test_longcat() -> None:
    config = read("LongcatFlashForCausalLM")
    assert len(config.blocks) == 4 and config.names.blocks_per_layer == 2
    mixtures = [block.mixture for block in config.blocks if isinstance(block, ShortcutBlockSpec)]
    assert [mixture is None for mixture in mixtures] == [False, True, False, True]
    assert mixtures[0] is not None and (mixtures[0].num_experts, mixtures[0].zero_experts) == (4, 2)


def test_phimoe_scales_its_rotation_by_the_longest_sequence() -> None:
    rope = read("PhiMoEForCausalLM").blocks[0].attention.rope
    assert rope is not None and (rope.attention_factor, rope.long_attention_factor) == (1.25, 1.5)


def test_zamba2() -> None:
    config = read("Zamba2ForCausalLM")
    assert isinstance(config, Zamba2Config) and config.num_shared == 2
    both = config.blocks[1]
    assert both.cache is not None and both.state is not None and config.blocks[0].cache is None
    assert config.shared.attention.head_dim == 32 and config.shared.attention.scale == pytest.approx(0.25)


@pytest.mark.parametrize(("name", "changes", "field"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        read(name, **changes)
