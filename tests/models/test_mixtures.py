"""Mixtures in the forms in which exporters write them: experts one by one, stacked, in MXFP4, in GGUF files; and what is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.kernels.expert_mlp.reference import E2M1
from headway.kernels.route_experts import route_experts
from headway.models.decoder import DecoderModel
from headway.models.layers import moe
from headway.models.layers.linear import Linear
from headway.models.layers.moe import Mixture
from headway.models.load import describe, load_model
from headway.models.quantized_weights import BlockUse
from headway.models.registry import read_config
from headway.weights import open_checkpoint
from tests.models.harness import DEVICE, Machine, Row
from tests.models.test_decoder import TOLERANCE
from tests.models.tiny import LENGTH, MAX_LEN, TINY, hf_model, ours, pair
from tests.weights.tiny_gguf import write_gguf


def loaded(path: Path, **changes: Any) -> DecoderModel:
    found = load_model(
        open_checkpoint(str(path)),
        dtype=torch.float32,
        device=DEVICE,
        max_model_len=MAX_LEN,
        progress=False,
        seed=0,
        **changes,
    )
    assert isinstance(found, DecoderModel)
    return found


def check(model: DecoderModel, name: str) -> None:
    case = pair(name)
    logits = Machine(model).in_chunks(case.tokens, [9, LENGTH - 9])
    torch.testing.assert_close(logits, case.logits, **TOLERANCE)


def unsaved(model: Any, folder: Path) -> Path:
    """What transformers has in memory, which other exporters write: experts stacked."""
    model.config.save_pretrained(folder)
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "glm4-moe", "gpt-oss", "llama4"])
def test_stacked_experts(name: str, tmp_path: Path) -> None:
    oracle = hf_model(TINY[name])
    oracle.config.architectures = [type(oracle).__name__]
    check(loaded(unsaved(oracle, tmp_path)), name)


def test_padding_and_zombies_go_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of all tokens, and behind the layer from which on only last tokens are computed."""
    found, op = [], route_experts

    def recording(*arguments: Any) -> Any:
        ids, weights = op(*arguments)
        found.append((ids.clone(), weights.clone()))
        return ids, weights

    monkeypatch.setattr(moe, "route_experts", recording)
    machine = Machine(pair("qwen3-moe").model)
    rows = [Row(3, [5, 6, 7]), Row(0, [5, 9], 20, alive=False), Row(4, [8])]
    machine.step(rows, pad_rows=2, pad_tokens=3)
    machine.last_step(rows, pad_rows=2, pad_tokens=3)
    all_tokens, last = [True] * 3 + [False] * 2 + [True] + [False] * 3, [True, False, True, False, False]
    for (ids, weights), live in zip(found, [all_tokens, all_tokens, all_tokens, last], strict=True):
        assert (ids >= 0).all(1).tolist() == (ids >= 0).any(1).tolist() == live
        assert (weights != 0).all(1).tolist() == (weights != 0).any(1).tolist() == live


@pytest.mark.parametrize("most", [3, 256])
@pytest.mark.parametrize(("name", "always"), [("glm4-moe", 2), ("dots1", 1), ("ernie-moe", 2), ("qwen2-moe", 0)])
def test_shared_blocks_as_experts(name: str, always: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; steps of up to ``most`` tokens have them among the experts."""
    found = moe.shared_experts
    monkeypatch.setattr(moe, "shared_experts", lambda spec, device: found(spec, torch.device("cuda")))
    monkeypatch.setattr(moe, "MOST_SHARED", most)
    model = ours(hf_model(TINY[name]))
    mixture = next(each for each in model.modules() if isinstance(each, Mixture))
    assert mixture.always == always and (mixture.shared is None) == bool(always)
    assert len(mixture.gate_up) == len(mixture.experts) + always
    assert model.spec.layer_weights == pair(name).model.spec.layer_weights
    check(model, name)


def test_a_shared_block_in_another_form_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "shared_experts", lambda spec, device: 2)
    monkeypatch.setattr(Linear, "dense", None)
    found = next(each for each in pair("glm4-moe").model.modules() if isinstance(each, Mixture))
    mixture = found.spec.make(found.router.shape[1], dtype=torch.float32, device=DEVICE)
    mixture.finalize()
    assert mixture.shared is not None and mixture.always == 0 and len(mixture.gate_up) == len(mixture.down) == 12


def test_a_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    oracle = hf_model(TINY["qwen3-moe"])
    oracle.config.architectures = ["Qwen3MoeForCausalLM"]
    experts = oracle.model.layers[1].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data[:5]
    with pytest.raises(WeightsError, match=r"layers.1.mlp.experts.gate_up_proj has shape .* implies 6 times 2 parts"):
        loaded(unsaved(oracle, tmp_path))


def random_fp4(rows: tuple[int, ...], columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [..., K / 32, 16] and scales [..., K / 32] as checkpoints have them, and their values [..., K]."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randint(0, 16, (*rows, columns // 32, 32), generator=generator)
    scales = torch.randint(120, 125, (*rows, columns // 32), generator=generator)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = (table[halves] * 2.0 ** (scales - 127)[..., None]).flatten(-2)
    blocks = (halves[..., 0::2] | halves[..., 1::2] << 4).to(torch.uint8)
    return blocks, scales.to(torch.uint8), values


def test_mxfp4(tmp_path: Path) -> None:
    """gpt-oss as it is published; transformers is given the values."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, sliding_window=6, max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    oracle = transformers.GptOssForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in oracle.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    stored: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(oracle.model.layers):
        for name, rows, columns in (("gate_up_proj", 256, 64), ("down_proj", 64, 128)):
            blocks, scales, values = random_fp4((5, rows), columns, layer)
            getattr(block.mlp.experts, name).data = values.transpose(1, 2).contiguous()
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            stored |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    stored |= {name: each.contiguous() for name, each in oracle.state_dict().items() if not name.endswith("_proj")}
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")

    model = loaded(tmp_path)
    mixture = next(each for each in model.modules() if isinstance(each, Mixture))
    assert mixture.gate_up.dtype == torch.uint8
    tokens = torch.randint(0, 97, (LENGTH,), generator=generator).tolist()
    with torch.no_grad():
        wanted = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Machine(model).in_chunks(tokens, [9, LENGTH - 9]), wanted, **TOLERANCE)
    stored["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = 161
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="block of MXFP4 with the scale 161; 160 is the most"):
        loaded(tmp_path)


def test_dummies_of_4_bits_have_finite_logits(tmp_path: Path) -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=5, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    model = load_model(
        open_checkpoint(str(tmp_path), load_format="dummy"), dtype=torch.float32, device=DEVICE, max_model_len=MAX_LEN,
        progress=False, seed=0,
    )  # fmt: skip
    assert isinstance(model, DecoderModel)
    logits = Machine(model).in_chunks([1, 2, 3], [3])
    assert logits.isfinite().all() and 0 < logits.std() < 10


GGUF_BLOCKS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


def gguf_arrays(model: Any) -> dict[str, Any]:
    """A transformers model's weights as llama.cpp's converter names and stacks them."""
    found = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    found["lm_head.weight"] = "output.weight"
    arrays = {}
    for name, tensor in model.state_dict().items():
        if name in found:
            arrays[found[name]] = tensor.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            arrays[f"blk.{layer}.ffn_gate_exps.weight"] = gate.contiguous().numpy()
            arrays[f"blk.{layer}.ffn_up_exps.weight"] = up.contiguous().numpy()
        elif rest == "mlp.experts.down_proj":
            arrays[f"blk.{layer}.ffn_down_exps.weight"] = tensor.numpy()
        else:
            stem, _, kind = rest.rpartition(".")
            if stem.endswith(("q_proj", "k_proj")) and model.config.model_type == "mixtral":
                heads = 4 if stem.endswith("q_proj") else 2
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            flat = tensor[0] if stem.endswith("shared_expert_gate") else tensor
            arrays[f"blk.{layer}.{GGUF_BLOCKS[stem]}.{kind}"] = flat.contiguous().numpy()
    return arrays


@pytest.mark.parametrize(
    ("name", "arch", "extra"),
    [
        ("qwen3-moe", "qwen3moe", {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24}),
        (
            "qwen2-moe", "qwen2moe",
            {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_weights_norm": True}
            | {"expert_shared_feed_forward_length": 32, "attention.key_length": 10},
        ),
        ("mixtral", "llama", {"expert_count": 5, "expert_used_count": 3}),
    ],
)  # fmt: skip
def test_gguf(name: str, arch: str, extra: dict[str, Any], tmp_path: Path) -> None:
    oracle = hf_model(TINY[name])
    theta = oracle.config.rope_parameters["rope_theta"]
    sizes = {
        "embedding_length": 40, "feed_forward_length": 56, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 20, "attention.value_length": extra.get("attention.key_length", 20),
        "rope.freq_base": float(theta),
    }  # fmt: skip
    keys = {f"{arch}.{key}": value for key, value in (sizes | extra).items()}
    path = write_gguf(tmp_path / "model.gguf", gguf_arrays(oracle), arch=arch, extra=keys)
    check(loaded(path), name)
    check(loaded(path, blocks=BlockUse.ROUNDED), name)
    check(loaded(path, blocks=BlockUse.EXACT), name)


def test_gguf_files_with_experts_in_tensors_of_their_own_are_refused(tmp_path: Path) -> None:
    from tests.weights.tiny_gguf import llama_arrays

    arrays = llama_arrays({"blk.0.ffn_gate.0.weight": (24, 16)})
    keys = {"llama.expert_count": 1, "llama.expert_used_count": 1}
    with pytest.raises(UnsupportedModelError, match="older form of file"):
        open_checkpoint(str(write_gguf(tmp_path / "model.gguf", arrays, extra=keys)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than may be chosen from 6 experts"),
        ("qwen3-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer"),
        ("glm4-moe", {"n_group": 5}, "n_group = 5 of 12 experts"),
        ("glm4-moe", {"topk_group": 5}, "to be chosen from, does not come out even"),
        ("glm4-moe", {"num_experts_per_tok": 7}, "may be chosen from 12 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 must be"),
        ("gpt-oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "hidden_size = 40 must be a multiple of 64"),
        ("llama4", {"layer_types": ["full_attention"]}, "must name 4 layers"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "which is not implemented"),
        ("qwen3-moe", {"hidden_act": "mish"}, "hidden_act"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], message: str) -> None:
    oracle = hf_model(TINY[name])
    config = oracle.config.to_dict() | {"architectures": [type(oracle).__name__]}
    if "num_local_experts" in changes:
        config.pop("num_experts", None)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(config | changes)


def test_a_token_passes_some_weights() -> None:
    """What sizes a step's work counts of experts those that a token goes to."""
    oracle = hf_model(TINY["qwen3-moe"])
    every = sum(parameter.numel() for parameter in oracle.model.layers.parameters())
    experts = oracle.model.layers[0].mlp.experts
    idle = (experts.gate_up_proj.numel() + experts.down_proj.numel()) * 4 // 6
    found = describe(oracle.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert found.layer_weights == every - 2 * idle
