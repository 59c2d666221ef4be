"""What llama.cpp's converter makes of each architecture: names of tensors, metadata keys, and what it changes about weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

BLOCK_NAMES: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""A block's parts in a file -> in a Hugging Face checkpoint, where an architecture has no other names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufKind:
    """One architecture.

    Attributes:
        class_name, model_type: in config.json.
        names: of a block's parts, where they differ from ``BLOCK_NAMES``.
        interleaved: rows of queries and keys are in pairs (2 i, 2 i + 1), as llama.cpp rotates them.
        plus_one: norms are stored as what they multiply by, the checkpoint's weight plus 1.
        numbers: fields of config.json -> the metadata keys, below the architecture's name, that hold them.
        constants: fields of config.json that every file of the kind has.
        biases: fields of config.json -> the part of the first block that is there where they are true.
        windows: what ``attention.sliding_window`` above 0 changes in config.json besides that number.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    plus_one: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "attn_q"})
    windows: Mapping[str, Any] = field(default_factory=dict)


_AROUND: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM: Final = "attention.layer_norm_epsilon"
_GRANITE: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_BIASES: Final = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
_SLIDES: Final = {"use_sliding_window": True}

KINDS: Final[Mapping[str, GgufKind]] = MappingProxyType(
    {
        "llama": GgufKind(
            class_name="LlamaForCausalLM",
            model_type="llama",
            interleaved=True,
            windows={"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        ),
        "qwen2": GgufKind(class_name="Qwen2ForCausalLM", model_type="qwen2", windows=_SLIDES),
        "qwen3": GgufKind(class_name="Qwen3ForCausalLM", model_type="qwen3", windows=_SLIDES),
        "qwen2moe": GgufKind(class_name="Qwen2MoeForCausalLM", model_type="qwen2_moe", windows=_SLIDES),
        "qwen3moe": GgufKind(class_name="Qwen3MoeForCausalLM", model_type="qwen3_moe", windows=_SLIDES),
        "gemma": GgufKind(class_name="GemmaForCausalLM", model_type="gemma", plus_one=True, constants=_GELU),
        "gemma2": GgufKind(
            class_name="Gemma2ForCausalLM",
            model_type="gemma2",
            names=_AROUND,
            plus_one=True,
            constants=_GELU,
            numbers={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        ),
        "gemma3": GgufKind(
            class_name="Gemma3ForCausalLM",
            model_type="gemma3_text",
            names=_AROUND,
            plus_one=True,
            constants=_GELU,
            numbers={"rope_local_base_freq": "rope.freq_base_swa"},
        ),
        "phi3": GgufKind(
            class_name="Phi3ForCausalLM",
            model_type="phi3",
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "granite": GgufKind(
            class_name="GraniteForCausalLM",
            model_type="granite",
            interleaved=True,
            numbers=_GRANITE,
            biases=_BIASES,
        ),
        "smollm3": GgufKind(class_name="SmolLM3ForCausalLM", model_type="smollm3", interleaved=True),
        "arcee": GgufKind(
            class_name="ArceeForCausalLM",
            model_type="arcee",
            interleaved=True,
            constants={"hidden_act": "relu2"},
            biases=_BIASES,
        ),
        "seed_oss": GgufKind(
            class_name="SeedOssForCausalLM",
            model_type="seed_oss",
            names={"post_attention_norm": "post_attention_layernorm"},
            biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output"},
        ),
        "olmo2": GgufKind(
            class_name="Olmo2ForCausalLM",
            model_type="olmo2",
            names=_AROUND,
            windows={"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"},
        ),
        "olmoe": GgufKind(class_name="OlmoeForCausalLM", model_type="olmoe"),
        "exaone4": GgufKind(
            class_name="Exaone4ForCausalLM", model_type="exaone4", names=_AROUND, constants={"sliding_window": None}
        ),
        "glm4": GgufKind(
            class_name="Glm4ForCausalLM",
            model_type="glm4",
            names={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
        ),
        "command-r": GgufKind(
            class_name="CohereForCausalLM",
            model_type="cohere",
            numbers={"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        ),
        "cohere2": GgufKind(
            class_name="Cohere2ForCausalLM",
            model_type="cohere2",
            numbers={"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        ),
        "starcoder2": GgufKind(
            class_name="Starcoder2ForCausalLM",
            model_type="starcoder2",
            names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            numbers={"norm_epsilon": _LAYER_NORM},
            constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
            biases={"use_bias": "attn_q"},
        ),
        "stablelm": GgufKind(
            class_name="StableLmForCausalLM",
            model_type="stablelm",
            numbers={"layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
            biases={"use_qkv_bias": "attn_q"},
        ),
    }
)
"""``general.architecture`` -> what its files hold. Mistral, Mixtral and SmolLM files call themselves llama, OLMo 3 olmo2."""
