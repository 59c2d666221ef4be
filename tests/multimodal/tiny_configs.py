"""Configurations of the tiny decoders with sight, and of one that hears."""

from __future__ import annotations

from typing import Any

TOKEN, VIDEO, AUDIO, VOCAB = 100, 103, 104, 120
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 8],
    "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 20, "conv_kernel_size": 3,
}  # fmt: skip
_QWEN: dict[str, Any] = {"depth": 3, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2}
_QWEN_IDS = {"image_token_id": TOKEN, "video_token_id": VIDEO, "vision_start_token_id": 101, "vision_end_token_id": 102}


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "Llava",
        {
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3},
            "text_config": {**_TEXT, "model_type": "llama"},
            "image_token_index": TOKEN,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": {**_VISION, "image_size": 56},
            "text_config": {
                **_TEXT,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
            },
            "mm_tokens_per_image": 16,
            "boi_token_index": 101,
            "eoi_token_index": 102,
            "image_token_index": TOKEN,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "vision_config": {
                "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 64, "use_clipped_linears": True, "standardize": True,
            },
            "text_config": {
                **_TEXT, "num_hidden_layers": 4, "sliding_window": 8, "global_head_dim": 8, "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 4,
                "vocab_size_per_layer_input": VOCAB, "use_bidirectional_attention": "vision",
            },
            "boi_token_id": 101, "eoi_token_id": 102, "image_token_id": TOKEN, "video_token_id": VIDEO,
            "audio_token_id": AUDIO, "boa_token_id": 106, "eoa_token_index": 107, "vision_soft_tokens_per_image": 9,
            "audio_config": _AUDIO,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "text_config": {
                **_TEXT, "num_hidden_layers": 4, "sliding_window": 8, "num_kv_shared_layers": 2, "laurel_rank": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 4,
                "vocab_size_per_layer_input": 100, "altup_num_inputs": 3, "intermediate_size": [48] * 4,
                "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0],
            },
            "vision_config": {"hidden_size": 20, "vocab_size": 4, "vocab_offset": 100},
            "audio_config": {
                "hidden_size": 24, "vocab_size": 16, "vocab_offset": 104, "input_feat_size": 18,
                "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2, "conf_attention_chunk_size": 4,
                "conf_attention_context_left": 5, "conf_conv_kernel_size": 3, "sscp_conv_channel_size": [16, 8],
            },
            "audio_soft_tokens_per_image": 12, "boi_token_id": 101, "eoi_token_id": 102, "image_token_id": TOKEN,
            "audio_token_id": AUDIO, "boa_token_id": 106, "eoa_token_id": 107,
        },
    ),
    "gemma3n sees": (
        "Gemma3n",
        {
            "text_config": {
                **_TEXT, "sliding_window": 8, "num_kv_shared_layers": 0, "laurel_rank": 6,
                "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 4,
                "vocab_size_per_layer_input": 100, "altup_num_inputs": 3, "intermediate_size": [48] * 2,
                "activation_sparsity_pattern": [0.0, 0.0], "max_position_embeddings": 700,
            },
            "vision_config": {
                "hidden_size": 2048, "vocab_size": 4, "vocab_offset": 100, "model_args": {"channel_multiplier": 0.125},
                "image_size": 256,
            },
            "audio_config": {
                "hidden_size": 24, "vocab_size": 16, "vocab_offset": 104, "input_feat_size": 18,
                "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "sscp_conv_channel_size": [16, 8],
            },
            "audio_soft_tokens_per_image": 12, "boi_token_id": 101, "eoi_token_id": 102, "image_token_id": TOKEN,
            "audio_token_id": AUDIO, "boa_token_id": 106, "eoa_token_id": 107,
        },
    ),
    "paligemma": (
        "PaliGemma",
        {
            "vision_config": {**_VISION, "model_type": "siglip_vision_model", "projection_dim": 32},
            "text_config": {**_TEXT, "model_type": "gemma"},
            "image_token_index": TOKEN,
            "projection_dim": 32,
            "vocab_size": VOCAB,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "vision_config": {**_VISION, "image_size": 56},
            "text_config": {**_TEXT, "model_type": "llama"},
            "scale_factor": 2,
            "image_token_id": TOKEN,
        },
    ),
    "qwen2.5": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                **_QWEN, "hidden_size": 24, "intermediate_size": 40, "window_size": 32, "fullatt_block_indexes": [1],
                "out_hidden_size": 32,
            },
            "text_config": {**_NO_HEAD_DIM, **_mrope(1, 1, 2)},
            **_QWEN_IDS,
        },
    ),
    "qwen3": (
        "Qwen3VL",
        {
            "vision_config": {
                **_QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {**_TEXT, **_mrope(2, 1, 1)},
            **_QWEN_IDS,
        },
    ),
    "qwen2": (
        "Qwen2VL",
        {
            "vision_config": {**_QWEN, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32},
            "text_config": {**_NO_HEAD_DIM, **_mrope(1, 1, 2)},
            **_QWEN_IDS,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 56, "patch_size": 4},
            "text_config": {**_TEXT, "model_type": "mistral"},
            "image_token_index": TOKEN,
            "spatial_merge_size": 2,
        },
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [7, 7]},
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "image_token_id": TOKEN,
            "downsample_ratio": 0.5,
        },
    ),
}  # fmt: skip
