"""Random batches of requests that pool, on the simulated device: sizes, depths, chunks, preemptions, aborts and tasks drawn
from a seed; what each request gets must be what it gets alone on the synchronous engine.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from headway.core.messages import AddRequest
from headway.core.plan import Floats
from headway.core.task import Task
from tests.engine.tiny_encoders import build, engine, message, run, save
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import simulated

METHODS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt", "mean+max")
KINDS = {"bert": ("BertModel", {}), "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2})}
LONGEST, MOST_IDLE = 48, 300


@functools.cache
def folder(kind: str) -> str:
    name, config = KINDS[kind]
    return save(build(name, **config), Path(mkdtemp(prefix="headway-pooling-")))


@functools.cache
def alone(kind: str, methods: str) -> Any:
    """The synchronous engine on the CPU."""
    sizes: dict[str, Any] = {"max_model_len": LONGEST, "enable_prefix_caching": False, "run_ahead": 0}
    return engine(folder(kind), runner="pooling", pooler_config={"pooling_type": methods}, **sizes)


class Scenario:
    """Requests, and an engine for them."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.kind, self.methods = rng.choice([*KINDS]), rng.choice(METHODS)
        tokens = rng.choice([8, 16, 24]) if self.kind == "llama" else LONGEST
        self.sizes: dict[str, Any] = {
            "run_ahead": rng.choice([0, 1, 2, 4, "auto"]),
            "enforce_eager": rng.random() < 0.5,
            "max_num_seqs": rng.choice([1, 2, 4, 6]),
            "max_num_batched_tokens": tokens + rng.choice([0, 8, 40]),
            "max_model_len": LONGEST,
            "enable_prefix_caching": rng.random() < 0.7,
            "kv_cache_memory_bytes": rng.choice([7, 9, 30]) * KV_BLOCK_BYTES if self.kind == "llama" else None,
        }
        self.requests = [self._request(str(i)) for i in range(rng.randrange(4, 14))]
        self.abort_rate = rng.choice([0.0, 0.1, 0.3])

    def _request(self, name: str) -> AddRequest:
        rng = self.rng
        tokens = [rng.randrange(5, 97) for _ in range(rng.choice([1, 3, 7, 7, 20, LONGEST]))]
        if rng.random() < 0.3:
            tokens = ([9] * 16 + tokens)[:LONGEST]  # a prefix that others have, too
        fields: dict[str, Any] = {"raw": rng.random() < 0.3, "pool_start": rng.randrange(len(tokens))}
        if self.kind == "bert":
            start = rng.randrange(len(tokens) + 1)
            fields["token_type_range"] = (start, rng.randrange(start, len(tokens) + 1))
        by_token = rng.random() < 0.3 and Task.TOKEN_EMBED in alone(self.kind, self.methods).info.tasks
        return message(name, tokens, Task.TOKEN_EMBED if by_token else Task.EMBED, **fields)

    def play(self) -> None:
        found: dict[str, Floats] = {}
        aborted: set[str] = set()
        own = {"model": folder(self.kind), "runner": "pooling", "pooler_config": {"pooling_type": self.methods}}
        waiting, idle = list(self.requests), 0
        with simulated(self.rng.randrange(10**6), **self.sizes, **own) as (core, _, _):
            while waiting or core.has_work():
                for _ in range(min(len(waiting), self.rng.choice([0, 1, 3]))):
                    core.add(waiting.pop(0))
                if self.rng.random() < self.abort_rate:
                    victim = str(self.rng.randrange(len(self.requests) - len(waiting) or 1))
                    if victim not in found and victim not in {each.request_id for each in waiting}:
                        core.abort(victim)
                        aborted.add(victim)
                updates = list(core.step())
                idle = 0 if updates or waiting else idle + 1
                assert idle < MOST_IDLE, "the engine turns without progress"
                for update in updates:
                    assert update.error is None and update.request_id not in found and update.request_id not in aborted
                    found[update.request_id] = np.frombuffer(update.pooled or b"", np.float32)
        assert {*found} | aborted == {each.request_id for each in self.requests}
        for each in self.requests:
            if each.request_id in found:
                [expected] = run(alone(self.kind, self.methods), [each]).values()
                np.testing.assert_allclose(found[each.request_id], expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    Scenario(seed).play()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12, 300))
def test_many_random_batches(seed: int) -> None:
    Scenario(seed).play()
