"""A Hugging Face style configuration from the metadata of a GGUF file."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, Final

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.weights.gguf import ROPE_FACTORS, TENSOR_TYPES, read_tensor
from headway.weights.gguf_file import GgufHeader, end_token_ids

ARCHITECTURES: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""``general.architecture`` -> (class name, model type). Mistral, Mixtral and SmolLM files call themselves llama."""

SAMPLING_KEYS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""``general.sampling.*`` -> the field of generation_config.json that says the same."""

_DTYPES: Final = {"F32": "float32", "F16": "float16"}


def permuted_heads(header: GgufHeader) -> tuple[int, int] | None:
    """(H, KH) when q and k rows are stored interleaved: the converter does that to llama models only."""
    if header.get("general.architecture") != "llama":
        return None
    heads = _count(header, "attention.head_count")
    return heads, _count(header, "attention.head_count_kv", heads)


def build_config(header: GgufHeader) -> dict[str, Any]:
    """The ``config.json`` this file would have.

    ``rope_scaling`` is absent, or has ``rope_type`` "linear", "yarn", or "factors": then ``factors[i]`` divides the
    i-th rotary frequency, ``inv_freq[i] = rope_theta**(-2i/D) / factors[i]`` (llama.cpp's form of Llama 3 scaling).

    Raises:
        UnsupportedModelError: an architecture or rope scaling that is not read.
        WeightsError: a required key is missing or not a number.
    """
    architecture = header.get("general.architecture")
    if architecture not in ARCHITECTURES:
        have = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{header.path}: GGUF architecture {architecture!r} is not supported; have: {have}")
    class_name, model_type = ARCHITECTURES[architecture]
    names = {t.name: t for t in header.tensors}
    hidden, heads = _count(header, "embedding_length"), _count(header, "attention.head_count")
    head_dim = _count(header, "attention.key_length", hidden // heads)
    if _count(header, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{header.path}: keys and values of different sizes are not supported")
    if "token_embd.weight" not in names:
        raise WeightsError(f"{header.path} has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _inner(header),
        "num_hidden_layers": _count(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(header, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": names["token_embd.weight"].shape[0],
        "max_position_embeddings": _count(header, "context_length"),
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": _real(header, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "torch_dtype": _dtype(header),
    }
    config.update(_special_ids(header))
    rotary_dim = _count(header, "rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if scaling := _rope_scaling(header, rotary_dim):
        config["rope_scaling"] = scaling
    window = header.get(f"{architecture}.attention.sliding_window")
    if window:
        config["sliding_window"] = int(window)
        if architecture == "llama":
            config.update(architectures=["MistralForCausalLM"], model_type="mistral")
        else:
            config["use_sliding_window"] = True
    return config | _experts(header)


def _inner(header: GgufHeader) -> int:
    """The width of the dense feed-forward blocks; files of mixtures that have none may leave it out."""
    experts = f"{header.get('general.architecture')}.expert_count"
    return _count(header, "feed_forward_length", 1 if header.get(experts) else None)


def _experts(header: GgufHeader) -> dict[str, Any]:
    """What a mixture's file says of its experts; nothing where there are none."""
    architecture = header.get("general.architecture")
    if not header.get(f"{architecture}.expert_count"):
        return {"num_experts": 0} if architecture in ("qwen2moe", "qwen3moe") else {}
    inner, shared = _inner(header), "expert_shared_feed_forward_length"
    count = _count(header, "expert_count")
    found = {"num_experts_per_tok": _count(header, "expert_used_count")}
    if any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", tensor.name) for tensor in header.tensors):
        raise UnsupportedModelError(
            f"{header.path}: experts in tensors of their own are an older form of file; convert the model again"
        )
    if architecture == "llama":
        return found | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": count}
    found |= {
        "num_experts": count,
        "moe_intermediate_size": _count(header, "expert_feed_forward_length", inner),
        "norm_topk_prob": bool(header.get(f"{architecture}.expert_weights_norm", architecture == "qwen3moe")),
    }
    return found | (
        {"shared_expert_intermediate_size": _count(header, shared, inner)} if architecture == "qwen2moe" else {}
    )


def build_generation_config(header: GgufHeader) -> dict[str, Any]:
    """Token ids that begin and end generation, and the sampling its makers advise, as ``generation_config.json`` has them."""
    ends = end_token_ids(header)
    found: dict[str, Any] = {}
    for key, name in SAMPLING_KEYS.items():
        value = header.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
    if ends:
        found["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if isinstance(bos := header.get("tokenizer.ggml.bos_token_id"), int):
        found["bos_token_id"] = bos
    return found


def _special_ids(header: GgufHeader) -> dict[str, int]:
    pairs = {key: header.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return {key: value for key, value in pairs.items() if isinstance(value, int)}


def _rope_scaling(header: GgufHeader, rotary_dim: int) -> dict[str, Any] | None:
    architecture = header.get("general.architecture")
    kind = header.get(f"{architecture}.rope.scaling.type")
    factor = _real(header, "rope.scaling.factor", _real(header, "rope.scale_linear", 1.0))
    if kind is None and factor != 1.0:
        kind = "linear"
    record = next((t for t in header.tensors if t.name == ROPE_FACTORS), None)
    if record is not None:
        factors = read_tensor(header, record).double().flatten().tolist()  # host: a CPU tensor, at load time
        if kind not in (None, "none") or len(factors) != rotary_dim // 2 or not all(f > 0 for f in factors):
            raise UnsupportedModelError(
                f"{header.path}: {ROPE_FACTORS} with {len(factors)} values for {rotary_dim} rotary dimensions, "
                f"scaling type {kind!r}, is not supported"
            )
        return {"rope_type": "factors", "factors": factors}
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(header, factor)
    raise UnsupportedModelError(f"{header.path}: rope scaling {kind!r} is not supported; linear and yarn are")


def _yarn(header: GgufHeader, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = _count(header, "rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    attention = _real(header, "rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        # llama.cpp's number multiplies yarn's own magnitude; the Hugging Face key replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        value = _real(header, f"rope.scaling.yarn_{key}", 0.0)
        if value:
            scaling[key] = value
    return scaling


def _dtype(header: GgufHeader) -> str:
    """The dtype to compute in: that of most weight elements; bfloat16 for quantised files.

    Quantised files do not say what the model was trained in. bfloat16 has the range every model needs, float16 has not.
    """
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        known = TENSOR_TYPES.get(tensor.type_id)
        sizes[known.name if known else "other"] += math.prod(tensor.shape)
    return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16") if sizes else "float32"


def _lookup(header: GgufHeader, key: str) -> Any:
    value = header.get(f"{header.get('general.architecture')}.{key}")
    if isinstance(value, list):  # one value per layer
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"{header.path}: {key} differs between layers, which is not supported")
        return value[0]
    return value


def _count(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = _lookup(header, key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{header.path}: metadata {key} is {value!r}; a positive integer is needed")
    return value


def _real(header: GgufHeader, key: str, default: float) -> float:
    value = _lookup(header, key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise WeightsError(f"{header.path}: metadata {key} is {value!r}; a number is needed")
    return float(value)
