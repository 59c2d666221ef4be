"""Each kind of GGUF file gives transformers' logits: files are written from a transformers model, with the names that the gguf
package knows and with what llama.cpp's converter changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headway.models.decoder import DecoderModel
from headway.models.load import load_model
from headway.weights import open_checkpoint
from headway.weights.gguf_kinds import KINDS
from tests.models.harness import DEVICE, Machine
from tests.models.tiny import LENGTH, MAX_LEN, TINY, hf_model
from tests.weights.tiny_gguf import add

CASES = {
    "llama": "llama", "mistral-window": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3", "phi3": "phi3", "phi3-partial-window": "phi3", "llama-longrope": "phi3", "granite": "granite",
    "smollm3": "smollm3", "arcee": "arcee",
    "seed-oss": "seed_oss", "olmo2": "olmo2", "olmo3": "olmo2", "olmoe": "olmoe", "exaone4": "exaone4",
    "exaone4-full": "exaone4", "glm4": "glm4", "cohere": "command-r", "cohere2": "cohere2", "starcoder2": "starcoder2",
    "stablelm": "stablelm",
}  # fmt: skip


_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40, "attention_factor": 1.3,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0],
}  # fmt: skip
AS_FILES_ARE: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 6,
        "layer_types": None,
        "final_logit_softcapping": None,
    },
    "smollm3": {"no_rope_layer_interval": 4},
    "exaone4": {"num_hidden_layers": 4},
    "llama-longrope": {"family": "Phi3", "head_dim": 10, "pad_token_id": 0, "rope_parameters": _LONG},
}
"""What files do not hold, as their readers know it of the released models."""


def keys_of(arch: str, config: Any) -> dict[str, Any]:
    """Metadata, below the architecture's name."""
    rope = config.rope_parameters or {}
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(full["rope_theta"]),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", getattr(config, "norm_epsilon", None)),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", getattr(config, "logit_scale", None)),
        "use_parallel_residual": getattr(config, "use_parallel_residual", None) if arch == "stablelm" else None,
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found |= {"attention.key_length": head, "attention.value_length": head}
    if (part := full.get("partial_rotary_factor", 1.0)) != 1.0:
        found["rope.dimension_count"] = int(head * part)
    slides = not hasattr(config, "use_sliding_window") or config.use_sliding_window
    if slides and getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    if arch == "gemma3":
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if full.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }  # fmt: skip
    if full.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    if full.get("rope_type") == "longrope":
        found |= {
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.attn_factor": full.get("attention_factor"),
        }
    return found


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (0, D/2), (1, D/2 + 1).. order to pairs, as llama.cpp rotates them."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


PERMUTED = ("llama", "granite", "smollm3", "arcee")
"""Whose converters derive from llama.cpp's LlamaModel, which permutes. Said here once more: what is read from ``KINDS`` would
be wrong in the file and in its reader alike."""


def float32(weight: torch.Tensor) -> tuple[Any, gguf.GGMLQuantizationType | None]:
    """What a file has for a weight, and the type of its blocks; None: its own."""
    return weight.contiguous().numpy(), None


@torch.no_grad()
def write(path: Path, arch: str, model: Any, encode: Callable[[torch.Tensor], Any] = float32) -> None:
    """A GGUF file; ``encode`` as ``float32``, it may round weights in place."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    for key, value in keys_of(arch, config).items():
        add(writer, f"{arch}.{key}", value)
    ids = {name: i for i, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(ids[arch], config.num_hidden_layers)
    rope = config.rope_parameters or {}
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "mlp.experts.gate_up_proj" in name:
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                block = name.split(".")[2]
                data, kind = encode(half)
                writer.add_tensor(f"blk.{block}.ffn_{part}_exps.weight", data, raw_dtype=kind)
            continue
        stem, _, ending = name.rpartition(".")
        if "mlp.experts.down_proj" in name:
            stem, ending = name, "weight"
        target = table.get_name(stem)
        assert target is not None, f"gguf has no name for {name}"
        data, kind = encode(weight)
        if arch in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            count = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            data = interleaved(torch.from_numpy(data), count).numpy()
        if arch.startswith("gemma") and target.endswith("norm"):
            data = data + 1
        writer.add_tensor(f"{target}.{ending}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    tiny = TINY[case]
    changes = dict(AS_FILES_ARE.get(case, {}))
    oracle = hf_model(replace(tiny, family=changes.pop("family", tiny.family), config=tiny.config | changes))
    write(tmp_path / "model.gguf", CASES[case], oracle)
    tokens = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = oracle(tokens[None]).logits[0]
    model = load_model(
        open_checkpoint(str(tmp_path / "model.gguf")), dtype=torch.float32, device=DEVICE, max_model_len=MAX_LEN,
        progress=False, seed=0,
    )  # fmt: skip
    assert isinstance(model, DecoderModel)
    found = Machine(model).in_chunks(tokens.tolist(), (11, 15))
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-3), (found - wanted).abs().max()


def test_every_kind_is_tried() -> None:
    assert set(CASES.values()) >= set(KINDS) - {"qwen2moe", "qwen3moe"}  # these: tests/models/test_mixtures.py
