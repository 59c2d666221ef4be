"""Tiny random models whose checkpoints have a layer for multi-token prediction, and what it drafts, computed over whole texts
with the decoder layers of transformers."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.latent.tiny_latents import _EXPERTS, _INDEX, _YARN, Tiny, hf_model

MIXTURE = _EXPERTS | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}
NAMES = {"token": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
MIMO_NAMES = {
    "token": "token_layernorm", "hidden": "hidden_layernorm", "project": "input_proj", "norm": "final_layernorm"
}  # fmt: skip


@dataclass(frozen=True)
class Drafted:
    """A model with the parts of its layer: where the checkpoint has them, and in which order the projection reads."""

    tiny: Tiny
    prefix: str
    names: dict[str, str]
    architecture: str = ""
    hidden_first: bool = False


MODELS: dict[str, Drafted] = {
    "v3": Drafted(
        Tiny("DeepseekV3", MIXTURE | _YARN | {"q_lora_rank": 16, "num_hidden_layers": 2}), "model.layers.2.", NAMES
    ),
    "v3.2": Drafted(
        Tiny("DeepseekV32", _INDEX | {"num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2, "index_topk": 7}),
        "model.layers.2.",
        NAMES,
    ),
    "glm-4-moe": Drafted(
        Tiny(
            "Glm4Moe",
            MIXTURE
            | {"num_hidden_layers": 2, "head_dim": 8, "num_key_value_heads": 2, "use_qk_norm": True, "n_group": 1}
            | {"attention_bias": True, "tie_word_embeddings": False},
        ),
        "model.layers.2.",
        NAMES,
    ),
    "glm-4-moe-lite": Drafted(
        Tiny("Glm4MoeLite", MIXTURE | {"q_lora_rank": 18, "num_hidden_layers": 2, "n_group": 1}), "model.layers.2.", NAMES
    ),
    "mimo": Drafted(
        Tiny("Qwen2", {"num_hidden_layers": 2, "num_key_value_heads": 2}), "model.mtp_layers.0.", MIMO_NAMES,
        "MiMoForCausalLM", True,
    ),
}  # fmt: skip


def _layer(name: str) -> tuple[Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """The target, the layer's block, and what is around it; all random, the same in every process."""
    model = hf_model(MODELS[name].tiny)
    last = model.model.layers[-1]
    block = type(last)(model.config, len(model.model.layers) - 1).eval()
    generator = torch.Generator().manual_seed(5)
    for key, weight in block.state_dict().items():
        if weight.is_floating_point():
            weight.normal_(1.0 if "norm" in key and not key.endswith("bias") else 0.0, 0.25, generator=generator)
    hidden = model.config.hidden_size
    around = {key: 1 + 0.3 * torch.randn(hidden, generator=generator) for key in ("token", "hidden", "norm")}
    around["project"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    return model, block, around


@functools.cache
def folder_of(name: str) -> Path:
    """Where the checkpoint lies; written once per process."""
    case, folder = MODELS[name], Path(tempfile.mkdtemp(prefix=f"headway-mtp-{name}-"))
    model, block, around = _layer(name)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("num_mtp_layers", "num_nextn_predict_layers")}
    config |= {"num_nextn_predict_layers": 1} | ({"architectures": [case.architecture]} if case.architecture else {})
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"{case.prefix}{key}": value.contiguous() for key, value in block.state_dict().items()}
    tensors |= {f"{case.prefix}{case.names[key]}.weight": value for key, value in around.items()}
    if not case.architecture:  # what the layer shares is in the checkpoint once more
        tensors[f"{case.prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{case.prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class Oracle:
    """A model and its layer, on whole texts."""

    def __init__(self, name: str) -> None:
        self._target, self._block, self._around = _layer(name)
        self._hidden_first, self._eps = MODELS[name].hidden_first, self._target.config.rms_norm_eps

    @torch.no_grad()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """What follows ``tokens``, by the most likely token each."""
        found = self._target(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False)
        hidden, text = found.hidden_states[-1][0], list(tokens)
        for _ in range(number):
            out = self._pass(torch.tensor(text[1:]), hidden)
            text.append(int(self._target.lm_head(out[-1]).argmax()))
            hidden = torch.cat([hidden, out[-1:]])
        return text[len(tokens) :]

    def _pass(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        model = self._target.model
        parts = [self._norm(model.embed_tokens(tokens), "token"), self._norm(hidden, "hidden")]
        x = F.linear(torch.cat(parts[::-1] if self._hidden_first else parts, 1), self._around["project"])[None]
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        turned = model.rotary_emb(x, position_ids=positions)
        made = self._block(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return self._norm((made[0] if isinstance(made, tuple) else made)[0], "norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._around[name]
