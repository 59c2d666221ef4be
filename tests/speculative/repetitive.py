"""Requests whose texts repeat themselves, so that drafts from their own history are often right."""

from __future__ import annotations

import random
from typing import Any

from headway.core.messages import AddRequest
from tests.engine.harness import request
from tests.engine.test_depths import FEATURES
from tests.engine.tiny_llama import EOS

FEW = [2, 8, 40, 96]
LOOPS: dict[str, dict[str, Any]] = {
    "loop": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60, "allowed_token_ids": FEW[:3]},
    "warm_loop": {"temperature": 0.4, "ignore_eos": True, "max_tokens": 30, "logprobs": 2, "allowed_token_ids": FEW},
    "loop_alone": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30, "allowed_token_ids": FEW[:3]}
    | {"disable_spec_decode": True},
    "loop_until": {"temperature": 0.0, "max_tokens": 40, "allowed_token_ids": [*FEW, *EOS], "min_tokens": 20},
}


def repetitive(names: list[str], seed: int) -> list[AddRequest]:
    """Requests with the named features; prompts are phrases said several times."""
    rng, found = random.Random(seed), []
    for i, name in enumerate(names):
        phrase = [rng.randrange(97) for _ in range(rng.randrange(2, 8))]
        prompt = (phrase * 6)[: rng.randrange(4, 36)]
        found.append(request(f"{name}-{i}", prompt, seed=i, **(LOOPS | FEATURES)[name]))
    return found
