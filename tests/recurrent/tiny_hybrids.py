"""Tiny random models with states, from transformers: the oracle. Each is saved, loaded by us, and run on one
sequence."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.models.decoder import DecoderModel
from headway.models.load import load_model
from headway.weights import open_checkpoint
from tests.models.harness import DEVICE

LENGTH = 70
"""Tokens in the test sequence: more than a chunk."""
MAX_LEN = 80
VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Tiny:
    """A family of transformers and what its configuration changes."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    config_class: str = ""


HYBRIDS: dict[str, Tiny] = {
    "mamba": Tiny("Mamba", {"state_size": 5, "conv_kernel": 4}),
    "mamba-biases": Tiny("Mamba", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 7}),
    "falcon-mamba": Tiny("FalconMamba", {"state_size": 6, "tie_word_embeddings": False}),
    "mamba2": Tiny("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 16}),
    "mamba2-limits": Tiny(
        "Mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 7,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class Pair:
    """Our model and what transformers makes of one sequence: ``logits`` [LENGTH, V] of ``tokens``."""

    model: DecoderModel
    tokens: list[int]
    logits: torch.Tensor


def hf_model(case: Tiny) -> Any:
    """A random transformers model. Every weight counts: norms are not 1, biases not 0; decays are neither 0 nor 1."""
    import transformers

    config = getattr(transformers, case.config_class or f"{case.family}Config")(**_SIZES | case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        mean, spread = 0.0, 0.2
        if "norm" in name:
            mean = 1.0
        elif name.endswith("A_log"):
            mean, spread = -1.0, 1.0
        elif name.endswith((".D", "conv1d.weight")):
            mean, spread = 0.5, 0.5
        parameter.data.normal_(mean, spread, generator=generator)
    return model


def save(name: str, folder: Path) -> Path:
    """The checkpoint of a case."""
    hf_model(HYBRIDS[name]).save_pretrained(folder)
    return folder


@functools.cache
def folder_of(name: str) -> Path:
    """Where the checkpoint of a case lies; written once per process."""
    return save(name, Path(tempfile.mkdtemp(prefix=f"headway-{name}-")))


@functools.cache
def pair(name: str) -> Pair:
    """The case in float32, built once, loaded through the real checkpoint reader."""
    oracle = hf_model(HYBRIDS[name])
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    checkpoint = open_checkpoint(str(folder_of(name)))
    model = load_model(checkpoint, dtype=torch.float32, device=DEVICE, max_model_len=MAX_LEN, progress=False, seed=0)
    assert isinstance(model, DecoderModel)
    return Pair(model, tokens, logits)
