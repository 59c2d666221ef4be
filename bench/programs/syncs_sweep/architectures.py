"""Every architecture of transformers that its configuration class builds small: forward, a step, and what it generates."""
# ruff: noqa: ARG001, E501 - tables of calls, as their users write them

from __future__ import annotations

import functools
import inspect

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

MOST = 12_000_000
"""Parameters of a model, at most."""
SMALL = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "model_dim": 32, "hidden_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "depth": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_kv": 8,
    "max_position_embeddings": 64, "n_positions": 64, "max_source_positions": 64, "max_target_positions": 64, "image_size": 32, "patch_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "projection_dim": 16, "num_mel_bins": 16, "sliding_window": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "state_size": 8, "embedding_size": 32, "attention_window": 4, "out_hidden_size": 32, "mlp_dim": 48, "type_vocab_size": 4,
    "n_group": 1, "topk_group": 1, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip
IDS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "forced_eos_token_id",
)
HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "MODEL_FOR_CTC_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", "MODEL_FOR_OBJECT_DETECTION_MAPPING", "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING", "MODEL_MAPPING",
)  # fmt: skip


def _shrunk(config, seen=()):
    """The configuration with small sizes, and those inside it."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrunk(value)
        elif key in SMALL and isinstance(value, int) and not isinstance(value, bool) and value > SMALL[key]:
            _put(config, key, SMALL[key])
        elif key in IDS and isinstance(value, int) and value > 90:
            _put(config, key, 90)
    for key in ("num_hidden_layers", "num_layers", "n_layer"):
        if isinstance(getattr(config, key, None), int):
            for other in ("layer_types", "mlp_layer_types", "layers_block_type"):
                kinds = getattr(config, other, None)
                if isinstance(kinds, list) and len(kinds) > getattr(config, key):
                    several = list(dict.fromkeys(kinds))[: getattr(config, key)]
                    _put(config, other, (several * 2)[: getattr(config, key)])
            break
    return config


def _put(config, key, value):
    try:
        setattr(config, key, value)
    except Exception:
        return


def each_architecture():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for kind in CONFIG_MAPPING_NAMES:
        yield kind, functools.partial(_architecture, kind)


def _class_of(config):
    from transformers.models.auto import modeling_auto

    for name in HEADS:
        try:
            found = getattr(modeling_auto, name)[type(config)]
        except (KeyError, AttributeError):
            continue
        return found[0] if isinstance(found, (tuple, list)) else found
    raise ModuleNotFoundError("no model for this configuration alone")


def _inputs(model, config):
    text = getattr(config, "text_config", None) or config
    ids = torch.randint(5, 60, (2, 8))
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    given = {}
    if main == "pixel_values" or ("pixel_values" in accepted and main != "input_ids"):
        given["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), min(size, 64), min(size, 64))
    elif main == "input_values":
        given["input_values"] = torch.randn(2, 1600)
    elif main == "input_features":
        given["input_features"] = torch.randn(
            2, getattr(text, "num_mel_bins", 16), 2 * getattr(text, "max_source_positions", 32)
        )
    if main == "input_ids" or ("input_ids" in accepted and not given):
        given["input_ids"] = ids
        if "attention_mask" in accepted:
            mask = torch.ones_like(ids)
            mask[0, -2:] = 0
            given["attention_mask"] = mask
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = torch.randint(5, 60, (2, 4))
    name = type(model).__name__
    if "labels" in accepted and name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) and "input_ids" in given:
        given["labels"] = ids
    if "labels" in accepted and "Classification" in name:
        given["labels"] = torch.tensor([0, 1])
    return {key: value for key, value in given.items() if key in accepted or "kwargs" in accepted}


def _numbers(out):
    return [each for each in tree_leaves(dict(out) if hasattr(out, "items") else out) if isinstance(each, torch.Tensor)]


def _architecture(kind, device):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _shrunk(CONFIG_MAPPING[kind]())
    build = _class_of(config)
    with torch.device("meta"):
        if sum(p.numel() for p in build(config).parameters()) > MOST:
            raise ModuleNotFoundError("too large for a sweep")
    torch.manual_seed(0)
    model = build(config)
    inputs = _inputs(model, config)
    model.to(device)
    inputs = tree_map_only(torch.Tensor, lambda value: value.to(device), inputs)
    model.eval()
    with torch.no_grad():
        first = [each.float() for each in _numbers(model(**inputs)) if each.is_floating_point()][:3]
    found = [first]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    out = model(**inputs)
    losses = [each for each in _numbers(out) if each.requires_grad]
    if losses:
        loss = losses[0].float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss, [p.detach().float().sum() for p in model.parameters()][:20]]
    if model.can_generate():
        model.eval()
        inputs.pop("labels", None)
        inputs.pop("decoder_input_ids", None)
        try:
            made = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            return found, type(error).__name__
        found.append(made if isinstance(made, torch.Tensor) else _numbers(made)[:1])
    return found
