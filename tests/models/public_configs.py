"""The config.json of public checkpoints, as they were released: every option is theirs, sizes are small."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.0,
}  # fmt: skip
_LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "max_position_embeddings": 32768}
_QWEN3 = _QWEN | {
    "attention_bias": False,
    "head_dim": 24,
    "rope_scaling": None,
    "sliding_window": None,
    "max_window_layers": 36,
}
_MOE = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
_LATENT = {
    "attention_bias": False, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "moe_intermediate_size": 24, "n_routed_experts": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1,
    "tie_word_embeddings": False, "max_position_embeddings": 163840,
}  # fmt: skip
_DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_V3 = _LATENT | {
    "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "num_experts_per_tok": 2, "rope_theta": 10000,
    "num_nextn_predict_layers": 1, "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_GRANITE = {
    "attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
    "logits_scaling": 8.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
_GRANITE4 = _GRANITE | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8,
    "mamba_proj_bias": False, "position_embedding_type": "nope", "normalization_function": "rmsnorm", "rope_theta": 10000,
    "shared_intermediate_size": 40, "output_router_logits": False, "router_aux_loss_coef": 0.01, "init_method": "mup",
}  # fmt: skip
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
_SMALL_MAMBA = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "conv_kernel": 4, "expand": 2, "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "residual_in_fp32": True,
    "rescale_prenorm_residual": False, "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False,
    "use_conv_bias": True, "torch_dtype": "float32", "initializer_range": 0.1,
}  # fmt: skip
_FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.8, 2.2]
_NEMOTRON = {
    "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "ssm_state_size": 16, "tie_word_embeddings": False, "time_step_floor": 1e-4,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 4,
    "use_bias": False,
    "use_conv_bias": True, "use_mamba_kernels": True, "sliding_window": None, "max_position_embeddings": 8192,
}  # fmt: skip
PUBLIC: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2-7b": ("LlamaForCausalLM", _LLAMA | {"num_key_value_heads": 4, "max_position_embeddings": 4096}),
    "Llama-3.1-8B": ("LlamaForCausalLM", _LLAMA | {"rope_theta": 500000.0, "max_position_embeddings": 131072,
                                                   "rope_scaling": _LLAMA3 | {"factor": 8.0}}),
    "Llama-3.2-1B": ("LlamaForCausalLM", _LLAMA | {"rope_theta": 500000.0, "head_dim": 16, "tie_word_embeddings": True,
                                                   "max_position_embeddings": 131072,
                                                   "rope_scaling": _LLAMA3 | {"factor": 32.0}}),
    "deepseek-coder-6.7b": ("LlamaForCausalLM", _LLAMA | {"rope_theta": 100000, "max_position_embeddings": 16384,
                                                          "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "SmolLM2-360M": ("LlamaForCausalLM", _LLAMA | {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
                                                   "tie_word_embeddings": True, "max_position_embeddings": 8192}),
    "Falcon3-7B": ("LlamaForCausalLM", _LLAMA | {"head_dim": 32, "rope_theta": 1000042, "num_key_value_heads": 1,
                                                 "max_position_embeddings": 32768}),
    "AFM-4.5B": ("ArceeForCausalLM", _LLAMA | {"hidden_act": "relu2", "rope_theta": 10000.0, "max_position_embeddings": 65536,
                                               "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "beta_fast": 32.0,
                                                                "beta_slow": 1.0, "mscale": 1.0,
                                                                "original_max_position_embeddings": 4096}}),
    "Mistral-7B-v0.1": ("MistralForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
                                               "max_position_embeddings": 32768, "tie_word_embeddings": False}),
    "Mistral-Nemo": ("MistralForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
        "head_dim": 12,
                                            "max_position_embeddings": 131072, "tie_word_embeddings": False}),
    "Ministral-3-8B, text": ("Ministral3ForCausalLM", {
        "head_dim": 24, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                            "rope_type": "yarn", "type": "yarn"}, "tie_word_embeddings": False}),
    "Mixtral-8x7B": ("MixtralForCausalLM", {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
                                            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
                                            "output_router_logits": False, "max_position_embeddings": 32768}),
    "Qwen2.5-7B": ("Qwen2ForCausalLM", _QWEN | {"sliding_window": 131072, "max_window_layers": 28}),
    "Qwen2.5-72B, stretched": ("Qwen2ForCausalLM", _QWEN | {
        "sliding_window": 131072, "max_window_layers": 80,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeForCausalLM", _QWEN | _MOE | {
        "num_key_value_heads": 4, "max_window_layers": 21, "sliding_window": 32768, "decoder_sparse_step": 1, "num_experts": 10,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 48}),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", _QWEN3 | {"tie_word_embeddings": True}),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", _QWEN3 | _MOE | {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 8,
                                                              "norm_topk_prob": True}),
    "Qwen3-Next-80B-A3B": ("Qwen3NextForCausalLM", _MOE | {
        "attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 32, "mlp_only_layers": [],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 16, "norm_topk_prob": True, "num_experts": 8, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000, "shared_expert_intermediate_size": 24,
        "max_position_embeddings": 262144, "tie_word_embeddings": False}),
    "gemma-2b": ("GemmaForCausalLM", {"hidden_act": "gelu", "hidden_activation": None, "head_dim": 32, "num_key_value_heads": 1,
                                      "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "pad_token_id": 0,
                                      "max_position_embeddings": 8192}),
    "gemma-2-2b": ("Gemma2ForCausalLM", _GEMMA | {
        "hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 32,
        "query_pre_attn_scalar": 32, "sliding_window": 4096, "cache_implementation": "hybrid",
        "max_position_embeddings": 8192}),
    "gemma-3-1b": ("Gemma3ForCausalLM", _GEMMA | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 32, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 32, "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None,
        "sliding_window": 512, "sliding_window_pattern": 6, "cache_implementation": "hybrid", "num_hidden_layers": 7,
        "max_position_embeddings": 32768}),
    "phi-2": ("PhiForCausalLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_key_value_heads": 4, "embd_pdrop": 0.0,
                                 "partial_rotary_factor": 0.5, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
                                 "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 2048}),
    "Phi-3-mini-4k": ("Phi3ForCausalLM", {"attention_bias": False, "embd_pdrop": 0.0, "num_key_value_heads": 4,
                                          "original_max_position_embeddings": 4096, "pad_token_id": 0, "resid_pdrop": 0.0,
                                          "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
                                          "sliding_window": 2047,
                                          "max_position_embeddings": 4096}),
    "Phi-3-mini-128k": ("Phi3ForCausalLM", {
        "attention_bias": False, "num_key_value_heads": 4, "original_max_position_embeddings": 4096, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": {"long_factor": _FACTORS[::-1], "short_factor": _FACTORS, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "max_position_embeddings": 131072}),
    "Phi-4-mini": ("Phi3ForCausalLM", {
        "attention_bias": False, "full_attn_mod": 1, "original_max_position_embeddings": 4096, "pad_token_id": 0,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": _FACTORS[:6], "short_factor": [1.0] * 6, "type": "longrope"},
        "tie_word_embeddings": True, "max_position_embeddings": 131072}),
    "OLMo-2-7B": ("Olmo2ForCausalLM", {"attention_bias": False, "num_key_value_heads": 4, "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
                                       "rope_scaling": None, "rope_theta": 500000, "max_position_embeddings": 4096}),
    "Olmo-3-7B": ("Olmo3ForCausalLM", {
        "attention_bias": False, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_theta": 500000,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 4096, "max_position_embeddings": 65536,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"}}),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "num_experts": 8,
                                         "num_experts_per_tok": 2, "num_key_value_heads": 4, "pad_token_id": 0,
                                         "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
                                         "router_aux_loss_coef": 0.01, "max_position_embeddings": 4096}),
    "glm-4-9b": ("GlmForCausalLM", {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0,
                                    "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0, "tie_word_embeddings": False,
                                    "eos_token_id": [2, 3, 4], "max_position_embeddings": 131072}),
    "GLM-4-9B-0414": ("Glm4ForCausalLM", {"attention_bias": False, "head_dim": 16, "partial_rotary_factor": 0.5,
                                          "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                                          "eos_token_id": [2, 3, 4], "max_position_embeddings": 32768}),
    "GLM-4.5": ("Glm4MoeForCausalLM", {
        "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 16, "moe_intermediate_size": 24, "n_group": 1,
        "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2, "pad_token_id": 0,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 2.5, "topk_group": 1, "use_qk_norm": True, "eos_token_id": [2, 3, 4],
        "max_position_embeddings": 131072}),
    "GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", _V3 | {
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rope_scaling": None, "rope_theta": 1000000,
        "partial_rotary_factor": 1.0, "eos_token_id": [2, 3, 4], "max_position_embeddings": 202752}),
    "EXAONE-4.0-32B": ("Exaone4ForCausalLM", {
        "attention_dropout": 0.0, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": _LLAMA3 | {"factor": 16.0}, "rope_theta": 1000000, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "head_dim": 16, "max_position_embeddings": 131072}),
    "EXAONE-4.0-1.2B": ("Exaone4ForCausalLM", {
        "layer_types": ["full_attention"] * 4, "pad_token_id": 0, "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_scaling": _LLAMA3 | {"factor": 16.0}, "rope_theta": 1000000, "sliding_window_pattern": None,
        "tie_word_embeddings": True, "head_dim": 16, "max_position_embeddings": 65536}),
    "DeepSeek-V2-Lite": ("DeepseekV2ForCausalLM", _LATENT | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000}),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", _LATENT | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 16.0, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", _V3),
    "Kimi-K2": ("DeepseekV3ForCausalLM", _V3 | {
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"}, "max_position_embeddings": 131072}),
    "Moonlight-16B-A3B": ("DeepseekV3ForCausalLM", _V3 | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "rope_theta": 50000.0,
        "n_shared_experts": 2, "rope_scaling": None, "max_position_embeddings": 8192}),
    "gpt-oss-20b": ("GptOssForCausalLM", {
        "attention_bias": True, "experts_per_token": 2, "head_dim": 16, "hidden_act": "silu", "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts_per_tok": 2, "num_local_experts": 8,
        "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "max_position_embeddings": 131072}),
    "granite-3.3-8b": ("GraniteForCausalLM", _GRANITE),
    "granite-3.1-3b-a800m": ("GraniteMoeForCausalLM", _GRANITE | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "output_router_logits": False}),
    "granite-4.0-h-tiny": ("GraniteMoeHybridForCausalLM", _GRANITE4 | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "granite-4.0-h-micro": ("GraniteMoeHybridForCausalLM", _GRANITE4 | {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "granite-4.0-micro": ("GraniteMoeHybridForCausalLM", _GRANITE4 | {
        "layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope",
        "rope_theta": 10000000}),
    "Nemotron-H-8B": ("NemotronHForCausalLM", _NEMOTRON | {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5,
                                                           "head_dim": 16}),
    "Nemotron-3-Nano": ("NemotronHForCausalLM", _NEMOTRON | {
        "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "head_dim": 16, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "topk_group": 1, "norm_eps": 1e-5}),
    "Falcon-H1-1.5B": ("FalconH1ForCausalLM", {
        "attention_bias": False, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "head_dim": 16,
        "embedding_multiplier": 5.65, "key_multiplier": 0.39, "lm_head_multiplier": 0.0195, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 96, "mamba_d_state": 16,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
        "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_multipliers": [0.88, 0.3],
        "pad_token_id": 0, "projectors_bias": False, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e11,
        "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35], "ssm_out_multiplier": 0.23,
        "tie_word_embeddings": False, "max_position_embeddings": 131072}),
    "LFM2-1.2B": ("Lfm2ForCausalLM", {
        "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 16, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64,
        "conv_dim_out": 64, "conv_use_xavier_init": True, "norm_eps": 1e-5, "num_heads": 4, "pad_token_id": 0,
        "full_attn_idxs": [2], "rope_theta": 1000000.0, "use_pos_enc": True, "max_position_embeddings": 128000}),
    "LFM2-8B-A1B": ("Lfm2MoeForCausalLM", {
        "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_experts": 8,
        "moe_intermediate_size": 24, "norm_eps": 1e-5, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts_per_tok": 2,
        "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True,
        "max_position_embeddings": 128000}),
    "Zamba2-1.2B": ("Zamba2ForCausalLM", {
        "hidden_act": "gelu", "num_key_value_heads": 4, "hybrid_layer_ids": [1, 3], "mamba_d_conv": 4, "mamba_d_state": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_expand": 2, "mamba_headdim": 16, "mamba_ngroups": 1,
        "n_mamba_heads": 8, "num_mem_blocks": 1, "adapter_rank": 8, "use_mem_rope": True, "use_shared_attention_adapter": True,
        "use_shared_mlp_adapter": True, "add_bias_linear": False, "chunk_size": 256, "ffn_hidden_size": 96, "pad_token_id": 0,
        "gated_linear_unit": True, "kv_channels": 16, "num_logits_to_keep": 1, "num_query_groups": 4, "rms_norm_eps": 1e-5,
        "rope_theta": 10000, "time_step_limit": None, "use_conv_bias": True, "use_long_context": False, "vocab_size": 97,
        "max_position_embeddings": 4096}),
    "Jamba-v0.1": ("JambaForCausalLM", {
        "attn_layer_offset": 2, "attn_layer_period": 4, "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 4, "mamba_expand": 2,
        "mamba_inner_layernorms": True, "mamba_proj_bias": False, "num_experts_per_tok": 2, "num_logits_to_keep": 1,
        "pad_token_id": 0, "rms_norm_eps": 1e-6, "sliding_window": None, "tie_word_embeddings": False,
        "use_mamba_kernels": True,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "max_position_embeddings": 262144}),
    "mamba-130m": ("MambaForCausalLM", _SMALL_MAMBA | {
        "intermediate_size": 128, "state_size": 16, "time_step_init_scheme": "random", "time_step_rank": 4,
        "time_step_scale": 1.0,
        "d_model": 64, "d_inner": 128, "fused_add_norm": True, "n_layer": 3, "rms_norm": True, "ssm_cfg": {}}),
    "falcon-mamba-7b": ("FalconMambaForCausalLM", _SMALL_MAMBA | {
        "intermediate_size": 128, "mixer_rms_eps": 1e-6, "state_size": 16, "time_step_init_scheme": "random",
        "time_step_rank": 4,
        "time_step_scale": 1.0, "tie_word_embeddings": False, "use_mambapy": False, "use_associative_scan": True}),
    "Mamba-Codestral-7B": ("Mamba2ForCausalLM", _SMALL_MAMBA | {
        "chunk_size": 256, "head_dim": 16, "intermediate_size": 128, "n_groups": 2, "norm_before_gate": True, "num_heads": 8,
        "rms_norm": True, "state_size": 16, "tie_word_embeddings": False, "time_step_init_scheme": "random",
        "time_step_rank": 4,
        "time_step_limit": [0.0, float("inf")], "time_step_scale": 1.0}),
    "Kimi-Linear-48B-A3B": ("KimiLinearForCausalLM", {
        "first_k_dense_replace": 1, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "mla_use_nope": True, "model_max_length": 1048576,
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4,
                               "short_conv_kernel_size": 4},
        "moe_intermediate_size": 24, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 2, "num_nextn_predict_layers": 0, "pad_token_id": 0,
        "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "topk_group": 1,
        "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "use_grouped_topk": True}),
    "MiniMax-Text-01-hf": ("MiniMaxForCausalLM", {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "head_dim": 16,
        "block_size": 256, "full_attn_alpha_factor": 3.5565588200778455, "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0, "mlp_alpha_factor": 3.5565588200778455,
        "mlp_beta_factor": 1.0, "num_experts_per_tok": 2, "num_local_experts": 4, "rms_norm_eps": 1e-5,
        "rotary_dim": 16,  # transformers rotates all of a head; the release has 64 of 128
        "rope_theta": 10000000, "sliding_window": None, "tie_word_embeddings": False, "max_position_embeddings": 10240000}),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM", {
        "attn_type_list": [1] * 4, "head_dim": 16, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 96, "mtp_transformer_layers": 1, "num_experts_per_tok": 2,
        "num_local_experts": 8, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "rotary_dim": 8, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "max_position_embeddings": 196608}),
    "SmolLM3-3B": ("SmolLM3ForCausalLM", {
        "attention_bias": False, "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pad_token_id": 0, "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "max_position_embeddings": 65536}),
    "Seed-OSS-36B": ("SeedOssForCausalLM", {
        "attention_bias": True, "attention_out_bias": False, "head_dim": 24, "mlp_bias": False, "residual_dropout": 0.1,
        "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0, "tie_word_embeddings": False, "max_position_embeddings": 524288}),
    "ERNIE-4.5-0.3B": ("Ernie4_5ForCausalLM", {"head_dim": 24, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                                               "use_bias": False, "tie_word_embeddings": True,
                                               "max_position_embeddings": 131072}),
    "ERNIE-4.5-21B-A3B": ("Ernie4_5_MoeForCausalLM", {
        "head_dim": 16, "moe_intermediate_size": 24, "moe_k": 2, "moe_layer_end_index": 3, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_norm_min": 1e-12, "moe_num_experts": 8, "moe_num_shared_experts": 2, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_bias": False, "tie_word_embeddings": True,
        "max_position_embeddings": 131072}),
    "Hunyuan-7B": ("HunYuanDenseV1ForCausalLM", {
        "attention_bias": False, "head_dim": 16, "mlp_bias": False, "norm_type": "rms", "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "use_cla": False, "use_qk_norm": True, "cla_share_factor": 2, "tie_word_embeddings": True,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "type": "dynamic"}, "max_position_embeddings": 32768}),
    "c4ai-command-r-v01": ("CohereForCausalLM", {
        "attention_bias": False, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "num_key_value_heads": 4, "pad_token_id": 0,
        "rope_theta": 8000000.0, "use_qk_norm": False, "model_max_length": 131072, "max_position_embeddings": 8192}),
    "c4ai-command-r7b": ("Cohere2ForCausalLM", {
        "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 16, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "rope_scaling": None,
        "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "max_position_embeddings": 8192}),
    "dots.llm1": ("Dots1ForCausalLM", {
        "attention_bias": False, "first_k_dense_replace": 1, "head_dim": 16, "max_window_layers": 62,
        "moe_intermediate_size": 24,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": True,
        "num_experts_per_tok": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000,
        "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "use_sliding_window": False, "max_position_embeddings": 32768}),
    "Llama-4-Scout, text": ("Llama4ForCausalLM", {
        "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "for_llm_compressor": False, "head_dim": 16, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0], "num_experts_per_tok": 1, "num_local_experts": 4, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": _LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0 + 3.0}, "rope_theta": 500000.0,
        "router_jitter_noise": 0.0, "use_qk_norm": False, "output_router_logits": False, "max_position_embeddings": 10485760}),
    "starcoder2-3b": ("Starcoder2ForCausalLM", {
        "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "sliding_window": 4096,
        "use_bias": True, "max_position_embeddings": 16384}),
    "stablelm-2-1_6b": ("StableLmForCausalLM", {
        "layer_norm_eps": 1e-5, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "qk_layernorm": False,
        "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": False, "use_parallel_residual": False,
        "use_qkv_bias": True, "max_position_embeddings": 4096}),
    "pythia-160m": ("GPTNeoXForCausalLM", {
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True, "max_position_embeddings": 2048}),
    "MiniCPM3-4B": ("MiniCPM3ForCausalLM", {
        "attention_bias": False, "dim_model_base": 16, "kv_lora_rank": 32, "num_key_value_heads": 4, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "longrope", "long_factor": _FACTORS[:4], "short_factor": _FACTORS[:4],
                         "original_max_position_embeddings": 32768}, "v_head_dim": 12, "max_position_embeddings": 32768}),
}  # fmt: skip
"""name -> architecture, and what its config.json says beside ``SIZES``."""
