"""Configurations synthesised from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from headway.core.errors import ModelError, UnsupportedModelError, WeightsError
from headway.weights import open_checkpoint
from headway.weights.source import Source
from tests.weights.tiny_gguf import Arrays, llama_arrays, write_gguf


def config(tmp_path: Path, extra: dict[str, Any] | None = None, arch: str = "llama", **kw: Any) -> dict[str, Any]:
    arrays: Arrays = kw.pop("arrays", None) or llama_arrays()
    path = write_gguf(tmp_path / "m.gguf", arrays, arch=arch, extra=extra, **kw)
    return open_checkpoint(str(path)).config


def test_what_the_file_advises_on_sampling_comes_before_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "penalty_repeat": 1.1, "mirostat": 2}
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), extra={f"general.sampling.{k}": v for k, v in said.items()})
    names = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1}
    assert open_checkpoint(str(path)).generation_config == pytest.approx(names)
    known = dict.fromkeys(names, 0.5) | {"presence_penalty": 0.25}
    monkeypatch.setattr("headway.weights.checkpoint.locate", lambda *_, **__: Source(path, True, known))
    for load_format in ("auto", "dummy"):
        found = open_checkpoint("known", load_format=load_format).generation_config
        assert found == pytest.approx(names | {"presence_penalty": 0.25})


def test_plain_llama(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), extra=ids)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "vocab_size": 11,
        "max_position_embeddings": 64,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation_config == {"eos_token_id": [2, 5], "bos_token_id": 1}


@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_architectures(tmp_path: Path, arch: str, name: str) -> None:
    found = config(tmp_path, {f"{arch}.attention.key_length": 8, f"{arch}.attention.value_length": 8}, arch)
    assert found["architectures"] == [name]
    assert found["head_dim"] == 8


def test_untied_and_biased(tmp_path: Path) -> None:
    found = config(tmp_path, arrays=llama_arrays({"output.weight": (11, 16), "blk.0.attn_q.bias": (16,)}))
    assert not found["tie_word_embeddings"]
    assert found["attention_bias"]


def test_absent_keys_have_defaults(tmp_path: Path) -> None:
    found = config(tmp_path, {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None})
    assert found["num_key_value_heads"] == 4
    assert found["rope_theta"] == 10000.0
    assert "rope_scaling" not in found
    assert "bos_token_id" not in found


def test_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    found = config(tmp_path, {"llama.attention.sliding_window": 32})
    assert (found["sliding_window"], found["model_type"]) == (32, "mistral")
    assert found["architectures"] == ["MistralForCausalLM"]


def test_partial_rotary(tmp_path: Path) -> None:
    assert config(tmp_path, {"llama.rope.dimension_count": 2})["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 0.5, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "attention_factor": pytest.approx(0.5 * (0.1 * np.log(4.0) + 1)),
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert config(tmp_path, {f"llama.rope.scaling.{k}": v for k, v in extra.items()}).get("rope_scaling") == expected


def test_rope_factors_tensor(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["rope_freqs.weight"] = np.array([1.0, 8.0], dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", arrays)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 8.0]}
    assert not any("rope" in name for name in checkpoint.tensor_names())


@pytest.mark.parametrize("factors", [[1.0], [1.0, 0.0], [1.0, np.nan]])
def test_bad_rope_factors(tmp_path: Path, factors: list[float]) -> None:
    arrays = llama_arrays()
    arrays["rope_freqs.weight"] = np.array(factors, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        config(tmp_path, arrays=arrays)


def test_dtype_of_quantised_files(tmp_path: Path) -> None:
    data = np.zeros((64, 34), dtype=np.uint8)
    assert config(tmp_path, raw={"output.weight": (data, Q.Q8_0)})["torch_dtype"] == "float32"
    data = np.zeros((640, 34), dtype=np.uint8)
    assert config(tmp_path, raw={"output.weight": (data, Q.Q8_0)})["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("extra", "arch", "error", "message"),
    [
        ({}, "rwkv6", UnsupportedModelError, "'rwkv6'.*have: llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "llama", WeightsError, "expert_used_count is None"),
        ({"llama.rope.scaling.type": "longrope"}, "llama", UnsupportedModelError, "longrope"),
        (
            {"llama.attention.key_length": 8, "llama.attention.value_length": 4},
            "llama",
            UnsupportedModelError,
            "values",
        ),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama", UnsupportedModelError, "differs between layers"),
        ({"llama.block_count": None}, "llama", WeightsError, "block_count is None"),
        ({"llama.block_count": 0}, "llama", WeightsError, "block_count is 0"),
        ({"llama.embedding_length": "x"}, "llama", WeightsError, "embedding_length"),
        ({"llama.rope.freq_base": float("inf")}, "llama", WeightsError, "freq_base"),
    ],
)
def test_refusals(tmp_path: Path, extra: dict[str, Any], arch: str, error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        config(tmp_path, extra, arch)


def test_no_embedding(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["token_embd.weight"]
    with pytest.raises(WeightsError, match="token_embd"):
        config(tmp_path, arrays=arrays)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_a_window_of_qwens_is_switched_on_with_it(tmp_path: Path, arch: str) -> None:
    found = config(tmp_path, {f"{arch}.attention.sliding_window": 32}, arch)
    assert (found["sliding_window"], found["use_sliding_window"]) == (32, True)
    for none in ({f"{arch}.attention.sliding_window": 0}, {}):
        found = config(tmp_path, none, arch)
        assert not {"sliding_window", "use_sliding_window"} & found.keys(), "no layer slides"


def test_numbers_of_all_layers_may_be_listed_where_they_agree(tmp_path: Path) -> None:
    listed = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [24, 24]}
    assert config(tmp_path, listed) == config(tmp_path)


MIXTURE = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 40, "feed_forward_length": 24}
SHARED = {"expert_shared_feed_forward_length": 56}
OF_EXPERTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # architecture, metadata below its name, fields of config.json
    ("llama", MIXTURE, {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6,
                        "num_experts_per_tok": 3, "intermediate_size": 24}),
    ("qwen3moe", MIXTURE, {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                           "norm_topk_prob": True, "intermediate_size": 24}),
    ("qwen3moe", MIXTURE | {"expert_weights_norm": False}, {"norm_topk_prob": False}),
    ("qwen3moe", MIXTURE | {"expert_feed_forward_length": None}, {"moe_intermediate_size": 24}),
    ("qwen3moe", MIXTURE | {"feed_forward_length": None}, {"moe_intermediate_size": 40}),
    ("qwen2moe", MIXTURE | SHARED, {"norm_topk_prob": False, "shared_expert_intermediate_size": 56}),
    ("qwen2moe", MIXTURE | {"expert_weights_norm": True}, {"norm_topk_prob": True, "shared_expert_intermediate_size": 24}),
    ("qwen2moe", {}, {"num_experts": 0}),
    ("qwen3moe", {"expert_count": 0}, {"num_experts": 0}),
    ("olmoe", MIXTURE, {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False}),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "keys", "wanted"), OF_EXPERTS)
def test_experts(tmp_path: Path, arch: str, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = config(tmp_path, {f"{arch}.{key}": value for key, value in keys.items()}, arch)
    assert {name: found[name] for name in wanted} == wanted
    assert ("shared_expert_intermediate_size" in found) == (arch == "qwen2moe" and "expert_count" in keys)


def test_models_without_experts_say_how_wide_they_are(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="feed_forward_length is None"):
        config(tmp_path, {"qwen3moe.feed_forward_length": None}, "qwen3moe")
    assert "num_experts" not in config(tmp_path, {"llama.expert_count": 0})


def test_experts_one_by_one_are_an_older_form(tmp_path: Path) -> None:
    arrays = llama_arrays({"blk.0.ffn_up.5.weight": (24, 16)})
    with pytest.raises(UnsupportedModelError, match="an older form of file"):
        config(tmp_path, {f"llama.{key}": value for key, value in MIXTURE.items()}, arrays=arrays)


@pytest.mark.parametrize(
    ("arch", "layers", "scalar"),
    [("gemma2", 46, 4), ("gemma3", 62, 4), ("gemma2", 62, 8), ("gemma3", 46, 8), ("gemma2", 45, 8)],
)
def test_what_gemmas_divide_scores_by(tmp_path: Path, arch: str, layers: int, scalar: int) -> None:
    """Of the two models of 27B it is not the head's size (here 8) but the hidden size by the heads (16 by 4)."""
    keys = {"block_count": layers, "attention.key_length": 8, "attention.value_length": 8}
    found = config(tmp_path, {f"{arch}.{key}": value for key, value in keys.items()}, arch)
    assert found["query_pre_attn_scalar"] == scalar
    assert "query_pre_attn_scalar" not in config(tmp_path, {"gemma.block_count": layers}, "gemma")


def longrope(short: list[float], long: list[float]) -> Arrays:
    arrays = llama_arrays()
    for name, factors in (("short", short), ("long", long)):
        if factors:
            arrays[f"rope_factors_{name}.weight"] = np.array(factors, dtype=np.float32)
    return arrays


def test_searched_factors(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.original_context_length": 32}
    wanted = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 32,
    }
    arrays = longrope([1.0, 1.5], [2.0, 4.0])
    assert config(tmp_path, keys, arrays=arrays)["rope_scaling"] == wanted
    found = config(tmp_path, keys | {"llama.rope.scaling.attn_factor": 1.25}, arrays=arrays)["rope_scaling"]
    assert found == wanted | {"attention_factor": 1.25}
    with pytest.raises(WeightsError, match="original_context_length is None"):
        config(tmp_path, arrays=arrays)


@pytest.mark.parametrize(
    ("short", "long"), [([], [2.0, 4.0]), ([1.0, 1.5], []), ([1.0], [2.0, 4.0]), ([1.0, 1.5], [2.0] * 3)]
)
def test_searched_factors_that_do_not_fit(tmp_path: Path, short: list[float], long: list[float]) -> None:
    with pytest.raises(UnsupportedModelError, match="need 2 values each"):
        config(tmp_path, {"llama.rope.scaling.original_context_length": 32}, arrays=longrope(short, long))


def test_factors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["rope_freqs.weight"] = np.array([1.0, 8.0], dtype=np.float32)
    assert config(tmp_path, {"llama.rope.scaling.type": "none"}, arrays=arrays)["rope_scaling"]["factors"] == [1.0, 8.0]
    with pytest.raises(UnsupportedModelError, match="scaling type 'linear'"):
        config(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, arrays=arrays)


def test_older_and_lesser_keys_of_scaling(tmp_path: Path) -> None:
    assert config(tmp_path, {"llama.rope.scale_linear": 3.0})["rope_scaling"] == {"rope_type": "linear", "factor": 3.0}
    assert "rope_scaling" not in config(tmp_path, {"llama.rope.scale_linear": 1.0})
    yarn = {"type": "yarn", "factor": 2.0, "yarn_beta_slow": 2.0, "attn_factor": 1.0}
    found = config(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in yarn.items()})
    assert found["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0, "beta_slow": 2.0}


@pytest.mark.parametrize(("kind", "name"), [(np.float16, "float16"), (np.float32, "float32")])
def test_the_dtype_is_that_of_most_elements(tmp_path: Path, kind: type, name: str) -> None:
    """Norms stay float32 in every file, and count little."""
    arrays: Any = {key: array.astype(kind) if array.ndim > 1 else array for key, array in llama_arrays().items()}
    assert config(tmp_path, arrays=arrays)["torch_dtype"] == name


def test_what_a_file_says_of_generation_is_taken_where_it_can_be_meant(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "general.sampling.temp": True,
        "general.sampling.top_k": "many",
        "general.sampling.min_p": 0.25,
    }
    said |= {"tokenizer.ggml.bos_token_id": "one", "tokenizer.ggml.eot_token_id": 7}
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), extra=said)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.generation_config == {"min_p": 0.25, "eos_token_id": 7}
    assert not {"bos_token_id", "eos_token_id"} & checkpoint.config.keys()
