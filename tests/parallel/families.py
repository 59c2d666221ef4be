"""Tiny models of every family of decoders, with random weights that need no transformers model: configurations alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headway.models.load import load_model
from headway.models.registry import ARCHITECTURES, model_class, read_config
from headway.weights import open_checkpoint
from tests.latent import tiny_latents
from tests.models import tiny
from tests.models.harness import Machine
from tests.models.tiny import LENGTH, MAX_LEN
from tests.recurrent import tiny_hybrids

DECODERS = (
    "llama", "arcee", "seed-oss", "smollm3", "qwen2", "qwen3", "mistral", "ministral", "ministral3", "phi3", "olmo2", "olmo3",
    "granite", "glm", "glm4", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3", "gpt-neox", "gptj", "phi",
    "stablelm", "starcoder2", "bloom", "mpt", "falcon-rw", "falcon-7b", "falcon-40b", "gemma3n", "gemma3n-shared", "gemma4",
    "gemma4-shared", "gemma4-keys-are-values", "ernie", "helium", "hunyuan", "gpt2", "gpt-bigcode", "opt",
)  # fmt: skip
MIXTURES = (
    "qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "granite-moe", "gpt-oss", "llama4", "glm4-moe", "v2-experts", "v3-experts",
    "glm-4-moe-lite-experts", "v3.2-experts", "jamba-moe", "nemotron-h-moe", "granite-hybrid-moe", "qwen3-next-moe",
    "qwen3.5-moe", "ernie-moe", "dots1", "hunyuan-moe", "flex-olmo", "minimax-m2", "phimoe", "solar-open", "granite-moe-shared",
    "exaone-moe", "lfm2-moe", "minimax", "kimi-linear",
)  # fmt: skip
LATENTS = ("v2-lite", "v3-yarn", "minicpm3", "v3.2-yarn-biases", "glm-dsa-shared", "longcat", "youtu")
STATES = ("mamba", "falcon-mamba", "mamba2", "falcon-h1", "lfm2", "qwen3.5", "olmo-hybrid", "zamba2")
EVEN: dict[str, dict[str, Any]] = {"glm-4-moe-lite-experts": {"num_attention_heads": 4, "num_key_value_heads": 4}}
"""Heads that two ranks can share."""


def configuration(name: str) -> tuple[str, dict[str, Any]]:
    """The architecture, and what its config.json says."""
    import transformers

    sizes: dict[str, Any]
    if name in tiny.TINY:
        case = tiny.TINY[name]
        sizes, family, kind = tiny._SIZES | case.config, case.model or case.family, f"{case.family}Config"
    elif name in tiny_latents.LATENTS:
        latent = tiny_latents.LATENTS[name]
        sizes, family, kind = tiny_latents._SIZES | latent.config, latent.family, f"{latent.family}Config"
    else:
        state = tiny_hybrids.HYBRIDS[name]
        sizes, family = tiny_hybrids._SIZES | state.config, state.family
        kind = state.config_class or f"{family}Config"
    sizes = {key: value for key, value in (sizes | EVEN.get(name, {})).items() if value != tiny.ABSENT}
    architecture = next(each for each in (f"{family}ForCausalLM", f"{family}LMHeadModel") if each in ARCHITECTURES)
    return architecture, getattr(transformers, kind)(**sizes).to_diff_dict() | {"architectures": [architecture]}


def write(config: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint: every tensor that the model wants, random."""
    (folder / "config.json").write_text(json.dumps(config, default=str))
    found = read_config(open_checkpoint(str(folder), load_format="dummy").config)
    model = model_class(found.architecture)(
        found, dtype=torch.float32, device=torch.device("cpu"), max_model_len=MAX_LEN
    )
    generator, tensors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for name, target in sorted(model.weights().targets.items()):
        if target.tensor.dtype == torch.uint8:
            low, high = (119, 122) if name.endswith("scales") else (0, 256)
            tensors[name] = torch.randint(low, high, target.shape, dtype=torch.uint8, generator=generator)
            continue
        is_norm = ("norm" in name or "ln_" in name or "scalar" in name) and not name.endswith("bias")
        mean, spread = float(is_norm), 0.2
        if name.endswith("A_log"):
            mean, spread = -1.0, 1.0
        tensors[name] = torch.empty(target.shape).normal_(mean, spread, generator=generator)
    save_file(tensors, folder / "model.safetensors")


def tokens_of(vocab: int = 90) -> list[int]:
    """One sequence."""
    return torch.randint(3, vocab, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def alone(folder: Path, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits [LENGTH, V] of one rank."""
    model: Any = load_model(
        open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), max_model_len=MAX_LEN,
        progress=False, seed=0,
    )  # fmt: skip
    return Machine(model).in_chunks(tokens, sizes)
