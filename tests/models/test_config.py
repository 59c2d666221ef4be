"""Reading config.json: every field that changes the arithmetic is honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.cache import CacheKind
from headway.core.errors import UnsupportedModelError
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.registry import ARCHITECTURES, model_class, read_config
from tests.models.tiny import TINY, hf_model

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def read(architecture: str = "LlamaForCausalLM", **fields: Any) -> DecoderConfig:
    found = read_config({"architectures": [architecture]} | BASE | fields)
    assert isinstance(found, DecoderConfig)
    return found


def windows(architecture: str = "LlamaForCausalLM", **fields: Any) -> tuple[int, ...]:
    return tuple(block.attention.window for block in read(architecture, **fields).blocks)


def test_minimal_llama() -> None:
    config = read()
    attention = config.blocks[0].attention
    assert (attention.head_dim, attention.num_heads, attention.num_kv_heads, len(config.blocks)) == (12, 4, 4, 3)
    assert attention.rope is not None
    assert (config.norm.eps, attention.rope.theta, attention.rope.kind) == (1e-6, 10000.0, "default")
    assert windows() == (0, 0, 0)
    assert not (attention.qkv_bias or attention.out_bias or config.blocks[0].mlp.bias or attention.qk_norm)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert attention.cache is not None
    assert attention.cache.kind is CacheKind.FULL
    assert [part.shape for part in attention.cache.parts] == [(4, 12), (4, 12)]


def test_defaults_of_absent_fields_are_each_familys() -> None:
    assert windows("MistralForCausalLM", num_attention_heads=8) == (4096,) * 3
    assert read("MistralForCausalLM", num_attention_heads=16, head_dim=12).blocks[0].attention.num_kv_heads == 8
    qwen3 = read("Qwen3ForCausalLM", num_key_value_heads=2).blocks[2].attention
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.window) == (128, "head", False, 0)
    qwen2 = read("Qwen2ForCausalLM", num_key_value_heads=2, attention_bias=False).blocks[2].attention
    assert (qwen2.head_dim, qwen2.qk_norm, qwen2.qkv_bias, qwen2.out_bias) == (12, "", True, False)


def test_null_means_absent_where_transformers_derives_it() -> None:
    config = read(head_dim=None, num_key_value_heads=None, sliding_window=None, rope_scaling=None, eos_token_id=None)
    assert (config.blocks[0].attention.head_dim, config.blocks[0].attention.num_kv_heads) == (12, 4)


def test_flags_and_ids() -> None:
    config = read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, eos_token_id=[2, 7])
    block = config.blocks[1]
    assert (block.attention.qkv_bias, block.attention.out_bias, block.mlp.bias, config.tie_word_embeddings) == (
        True,
    ) * 4
    assert config.eos_token_ids == (2, 7)
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(hidden_act="gelu_pytorch_tanh").blocks[0].mlp.activation == "gelu_tanh"


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "mistral-window", "qwen2-layer-types", "qwen3-bias-window"])
def test_what_transformers_writes_is_read(name: str) -> None:
    """The dictionary of this transformers version, whatever form it takes."""
    written = hf_model(TINY[name]).config.to_dict()
    written["architectures"] = [f"{TINY[name].family}ForCausalLM"]
    config = read_config(written)
    assert isinstance(config, DecoderConfig)
    assert (config.blocks[0].attention.head_dim, config.blocks[0].attention.num_kv_heads) == (
        20,
        written["num_key_value_heads"],
    )


class TestWindows:
    def test_llama_has_none_unless_layer_types_ask(self) -> None:
        assert windows(sliding_window=16) == (0, 0, 0)
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        assert windows(sliding_window=16, layer_types=kinds) == (0, 16, 0)

    def test_mistral_has_one_on_all_layers(self) -> None:
        assert windows("MistralForCausalLM", sliding_window=16, num_key_value_heads=4) == (16, 16, 16)
        assert windows("MistralForCausalLM", sliding_window=None, num_key_value_heads=4) == (0, 0, 0)

    @pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    def test_qwen_needs_its_switch(self, architecture: str) -> None:
        fields: dict[str, Any] = {"sliding_window": 9, "max_window_layers": 2, "num_key_value_heads": 4}
        assert windows(architecture, **fields) == (0, 0, 0)
        assert windows(architecture, **fields, use_sliding_window=True) == (0, 0, 9)
        fields["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
        assert windows(architecture, **fields, use_sliding_window=True) == (9, 0, 0)
        with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
            windows(architecture, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "hardswish"}, "hidden_act = 'hardswish'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"is_causal": False}, "is_causal"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({"layer_types": ["chunked_attention"] * 3, "sliding_window": 4}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "names 2 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "'su'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 50}, "hidden_size=50"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"intermediate_size": 64.0}, "intermediate_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"head_dim": 15}, "15 of the 15"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(**fields)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_families_without_mlp_biases_refuse_them(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match="mlp_bias"):
        read(architecture, num_key_value_heads=4, mlp_bias=True)


@pytest.mark.parametrize("fields", [{"logits_scaling": 1.0}, {"use_mrope": False}, {"attention_dropout": 0.1}])
def test_harmless_values_are_read(fields: dict[str, Any]) -> None:
    assert read(**fields) == read()


@pytest.mark.parametrize("names", [["MadeUpForCausalLM"], [], None, ["LlamaForCausalLM", "Qwen2ForCausalLM"]])
def test_unknown_architectures_list_what_is_supported(names: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(BASE | {"architectures": names})
    if names == ["MadeUpForCausalLM"]:
        assert all(name in str(caught.value) for name in ("MadeUpForCausalLM", *ARCHITECTURES))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_registry_names_lead_to_classes(name: str) -> None:
    same = {
        "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
        "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
        "PhiMoEForCausalLM": "PhimoeForCausalLM",
    }
    assert getattr(model_class(name), "__name__") == same.get(name, name)  # noqa: B009 - a protocol has none


def test_what_was_read_is_not_refused() -> None:
    """Which fields change the arithmetic depends on what an architecture honours."""
    fields = Fields({"logits_scaling": 8.0, "mlp_bias": True, "remark": "none"})
    assert fields.number("logits_scaling") == 8.0
    with pytest.raises(UnsupportedModelError, match="mlp_bias = True"):
        fields.refuse_unread()
    assert fields.with_defaults(mlp_bias=False).flag("mlp_bias")
    fields.refuse_unread()


def test_longest_context() -> None:
    def longest(**scaling: Any) -> int:
        return int(read(rope_scaling=scaling).longest_context)

    assert read().longest_context == 128
    assert longest(rope_type="linear", factor=4.0) == 512
    assert longest(rope_type="dynamic", factor=2.0) == 128
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == 256
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=16) == 128
