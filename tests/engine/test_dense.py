"""Dense families through the whole engine: greedy tokens of transformers at every depth of run-ahead, with prompts in chunks,
prefixes that hit and requests that are preempted."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models.load import load_model
from headway.state.cache_pool import bytes_per_block
from headway.weights import open_checkpoint
from tests.engine.harness import request, run
from tests.models.tiny import TINY, hf_model, save
from tests.sim.harness import simulated

VOCAB = 97
FAMILIES = (
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "glm4",
    "smollm3",
    "cohere2",
    "exaone4",
    "ministral",
    "ministral3",
)
MAX_LEN, BLOCK, NEW = 40, 8, 15
SPARE = 2
"""Blocks of the pool, one of them the null block, beside those that a request of MAX_LEN tokens takes."""


@functools.cache
def oracle(name: str) -> Any:
    """The transformers model."""
    return hf_model(TINY[name])


@functools.cache
def folder_of(name: str) -> str:
    return str(save(oracle(name), Path(tempfile.mkdtemp(prefix=f"headway-{name}-"))))


@functools.cache
def prompts() -> list[list[int]]:
    """Two begin alike and are longer than any window and than a step."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB) for _ in range(17)]
    return [stem + [rng.randrange(3, VOCAB) for _ in range(n)] for stem, n in ((common, 3), (common, 2), ([], 5))]


@functools.cache
def wanted(name: str) -> dict[str, list[int]]:
    """What transformers says next, one token at a time and without a cache."""
    found = {}
    for number, prompt in enumerate(prompts()):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                tokens.append(int(oracle(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found[str(number)] = tokens[len(prompt) :]
    return found


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "model": folder_of(name), "dtype": "float32", "max_model_len": MAX_LEN, "max_num_seqs": 3,
        "max_num_batched_tokens": 13, "block_size": BLOCK, "kv_cache_memory_bytes": small_pool(name),
    }  # fmt: skip
    return sizes | changes


@functools.cache
def small_pool(name: str) -> int:
    """Bytes of a pool in which one request fits as long as it may get, but not three as they are."""
    model = load_model(
        open_checkpoint(folder_of(name)), dtype=torch.float32, device=torch.device("cpu"), max_model_len=MAX_LEN,
        progress=False, seed=0,
    )  # fmt: skip
    cache = model.spec.cache
    return (SPARE + len(cache.groups) * -(-MAX_LEN // BLOCK)) * bytes_per_block(cache, BLOCK, torch.float32)


def depths(number: int) -> tuple[int, ...]:
    """Each family at two, which replays nothing, and at none, one or four in turns, with graphs."""
    return (2, (0, 1, 4)[number % 3])


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(name, depth, marks=() if depth in depths(number) else pytest.mark.soak)
        for number, name in enumerate(FAMILIES)
        for depth in (0, 1, 2, 4)
    ],
)
def test_greedy_tokens_are_those_of_transformers(name: str, depth: int) -> None:
    changes = arguments(name, run_ahead=depth, enforce_eager=depth == 2)
    asked = [
        request(str(n), prompt, temperature=0.0, ignore_eos=True, max_tokens=NEW) for n, prompt in enumerate(prompts())
    ]
    with simulated(7 + depth, **changes) as (core, _, _):
        for key, answer in run(core, asked).items():
            assert answer.token_ids == wanted(name)[key], key
        assert core.stats().num_preemptions > 0 and core.stats().prefix_cache_hits > 0
