"""Tiny random models of transformers, saved for our engine, and what transformers gives for a text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import Floats
from headway.core.task import Task
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

VOCAB = 97


def build(name: str, **config: Any) -> Any:
    """A random model of transformers: its class's name, and fields of its configuration, small by default."""
    cls = getattr(transformers, name)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    made = cls(cls.config_class(**(sizes | config))).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in made.named_parameters():
        mean = 1.0 if "norm" in parameter_name.lower() and parameter.dim() == 1 else 0.0
        parameter.data.normal_(mean, 0.2, generator=generator)
    return made


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def engine(folder: str, **overrides: Any) -> EngineCore:
    """An engine in float32 on the CPU, whose steps hold few texts."""
    args: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 8,
    }
    return build_engine(EngineArgs(model=folder, **(args | overrides)), progress=False)


def texts(number: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Token ids of random texts, some of equal length, the longest among them."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 7, 7, 20, longest]) for _ in range(number - 1)] + [longest]
    return [[rng.randrange(5, VOCAB) for _ in range(length)] for length in lengths]


def message(name: str, tokens: list[int], task: Task, **fields: Any) -> AddRequest:
    return AddRequest(
        request_id=name, prompt_token_ids=tokens, params=SamplingParams(), seed=0, eos_token_ids=[], task=task, **fields
    )


def run(core: EngineCore, messages: list[AddRequest]) -> dict[str, Floats]:
    """What each request gives, f32, flat."""
    for each in messages:
        core.add(each)
    found: dict[str, Floats] = {}
    for _ in range(5000):
        if not core.has_work():
            break
        for update in core.step():
            assert update.error is None and update.pooled is not None, update
            found[update.request_id] = np.frombuffer(update.pooled, np.float32)
    assert not core.has_work()
    core.check_integrity()
    return found


def pooled(core: EngineCore, texts: list[list[int]], task: Task, **fields: Any) -> list[Floats]:
    """The same for texts of one task."""
    found = run(core, [message(str(i), tokens, task, **fields) for i, tokens in enumerate(texts)])
    return [found[str(i)] for i in range(len(texts))]


def hidden_states(model: Any, tokens: list[int], **inputs: Any) -> torch.Tensor:
    """[T, C], what transformers gives for one text alone."""
    base = getattr(model, "base_model", model)
    with torch.no_grad():
        return base(torch.tensor([tokens]), **inputs).last_hidden_state[0]


def logits(model: Any, tokens: list[int], **inputs: Any) -> torch.Tensor:
    """[labels] or [T, labels], likewise."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), **inputs).logits[0]
