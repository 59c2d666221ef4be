"""A Hugging Face style configuration from the metadata of a GGUF file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.weights.gguf import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, TENSOR_TYPES, read_tensor
from headway.weights.gguf_file import GgufHeader, end_token_ids
from headway.weights.gguf_kinds import KINDS, GgufKind

SAMPLING_KEYS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""``general.sampling.*`` -> the field of generation_config.json that says the same."""

_DTYPES: Final = {"F32": "float32", "F16": "float16"}


def kind_of(header: GgufHeader) -> GgufKind:
    """What the file's architecture means. Raises UnsupportedModelError for one that is not read."""
    architecture = header.get("general.architecture")
    if architecture not in KINDS:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {architecture!r} is not supported; have: {', '.join(KINDS)}"
        )
    return KINDS[architecture]


def permuted_heads(header: GgufHeader) -> tuple[int, int] | None:
    """(H, KH) when q and k rows are stored interleaved, which the converter does to some kinds."""
    if not kind_of(header).interleaved:
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
    kind = kind_of(header)
    names = {t.name: t for t in header.tensors}
    hidden, heads = _count(header, "embedding_length"), _count(header, "attention.head_count")
    head_dim = _count(header, "attention.key_length", hidden // heads)
    if _count(header, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{header.path}: keys and values of different sizes are not supported")
    if "token_embd.weight" not in names:
        raise WeightsError(f"{header.path} has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [kind.class_name],
        "model_type": kind.model_type,
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
        "torch_dtype": _dtype(header),
    }
    config |= kind.constants
    config |= {name: f"blk.0.{part}.bias" in names for name, part in kind.biases.items()}
    config.update(_special_ids(header))
    config |= {name: _lookup(header, key) for name, key in kind.numbers.items() if _lookup(header, key) is not None}
    rotary_dim = _count(header, "rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if scaling := _rope_scaling(header, rotary_dim):
        config["rope_scaling"] = scaling
    if _lookup(header, "attention.sliding_window"):  # 0: no layer slides
        config |= {"sliding_window": _count(header, "attention.sliding_window"), **kind.windows}
    return config | _experts(header) | _gemma_scale(header, config)


def _gemma_scale(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 divide scores by, squared, which files do not hold: the head's size, but in the two models of 27B,
    which are told by their layers as the format's own reader tells them."""
    layers = {"gemma2": 46, "gemma3": 62}.get(header.get("general.architecture"))
    if layers is None:
        return {}
    large = config["num_hidden_layers"] == layers
    return {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    }


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
    if searched := _searched_factors(header, rotary_dim):
        return searched
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


def _searched_factors(header: GgufHeader, rotary_dim: int) -> dict[str, Any]:
    """LongRoPE's two lists of divisors; empty where the file has none."""
    records = {t.name: t for t in header.tensors}
    found: dict[str, Any] = {}
    for name, tensor_name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if tensor_name in records:
            factors = read_tensor(header, records[tensor_name]).double().flatten()
            found[name] = factors.tolist()  # host: a CPU tensor, at load time
    if not found:
        return {}
    if len(found) != 2 or any(len(each) != rotary_dim // 2 for each in found.values()):
        raise UnsupportedModelError(
            f"{header.path}: {SHORT_FACTORS} and {LONG_FACTORS} need {rotary_dim // 2} values each, half the rotary dimensions"
        )
    found |= {
        "rope_type": "longrope",
        "original_max_position_embeddings": _count(header, "rope.scaling.original_context_length"),
    }
    attention = _real(header, "rope.scaling.attn_factor", 0.0)
    return found | ({"attention_factor": attention} if attention else {})


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
