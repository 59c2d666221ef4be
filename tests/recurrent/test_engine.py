"""Models with states through the whole engine: greedy tokens of transformers on the CPU, and the same tokens on the
simulated device at every depth of run-ahead, in chunks, beside others, behind preemptions."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, OutOfMemoryError
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import request, run
from tests.recurrent.tiny_hybrids import HYBRIDS, VOCAB, folder_of, hf_model
from tests.sim.harness import simulated

CPU: dict[str, Any] = {"device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}
BUDGET = 16 * 2**20


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "model": str(folder_of(name)), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": 8, "kv_cache_memory_bytes": BUDGET,
    }  # fmt: skip
    return sizes | changes


def engine(name: str, **changes: Any) -> EngineCore:
    return build_engine(EngineArgs(**arguments(name, **CPU | changes)), progress=False)


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 17, 50, 71]))] for _ in range(9)]


def requests(max_tokens: int = 9) -> list[AddRequest]:
    found = []
    for number, prompt in enumerate(prompts()):
        sampled = {"temperature": 1.1} if number % 3 == 2 else {"temperature": 0.0}
        ends: dict[str, Any] = {"max_tokens": max_tokens + number, "ignore_eos": number % 2 == 0}
        found.append(request(f"r{number}", prompt, seed=number, **sampled, **ends))
    return found


@functools.cache
def truth(name: str) -> dict[str, list[int]]:
    core = engine(name)
    found = {key: answer.token_ids for key, answer in run(core, requests()).items()}
    core.shutdown()
    return found


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Two prompts at once, in chunks of up to 23 tokens."""
    oracle = hf_model(HYBRIDS[name])
    core = engine(name, max_num_batched_tokens=23)
    asked = [
        request(str(n), prompt, temperature=0.0, ignore_eos=True, max_tokens=6)
        for n, prompt in enumerate(prompts()[:2])
    ]
    answers = run(core, asked)
    core.shutdown()
    for number, prompt in enumerate(prompts()[:2]):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert answers[str(number)].token_ids == tokens[len(prompt) :]


def check_on_simulated_device(name: str, depth: int, number: int = 9) -> None:
    """Four slots for more requests: slots are used again, by requests whose states must begin anew."""
    changes = arguments(name, run_ahead=depth, enforce_eager=depth == 2, max_num_batched_tokens=(64, 23)[depth % 2])
    with simulated(7 + depth, **changes) as (core, _, _):
        for key, answer in run(core, requests()[:number]).items():
            assert answer.token_ids == truth(name)[key], key


OFTEN = ("mamba2", "falcon-h1")
RARELY = ("zamba2-one-block", "minimax", "lfm2-moe")
"""Of parts that others run at a depth; all run at every depth, with all requests, below."""


@pytest.mark.parametrize(
    ("depth", "name"),
    [
        *((2, name) for name in HYBRIDS if name not in RARELY),
        *((depth, name) for depth in (0, 1, 4) for name in OFTEN),
    ],
)
def test_simulated_device_gives_the_same_tokens(depth: int, name: str) -> None:
    check_on_simulated_device(name, depth, 9 if name in OFTEN else 6)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_model_at_every_depth(name: str, depth: int) -> None:
    check_on_simulated_device(name, depth)


def test_state_dtype() -> None:
    """Half the bytes; nearly the same tokens, and no keys or values are touched by the setting."""
    core = engine("mamba2", mamba_ssm_cache_dtype="bfloat16")
    ring, state = core._runner.executor.body.caches.states[0]
    assert (ring.dtype, state.dtype) == (torch.float32, torch.bfloat16)
    run(core, requests())
    core.shutdown()
    with pytest.raises(
        ConfigError, match="mamba_ssm_cache_dtype must be one of auto, float32, bfloat16, float16; got 'int8'"
    ):
        EngineArgs(model="x", mamba_ssm_cache_dtype="int8")


def state_dtype(name: str, **more: Any) -> torch.dtype:
    core = engine(name, dtype="bfloat16", **more)
    found = core._runner.executor.body.caches.states[0][1].dtype
    core.shutdown()
    return found


def test_state_dtype_that_nobody_named() -> None:
    """Of Mamba the model's; of the delta rule, and where drafts run it again from its inputs, float32."""
    assert state_dtype("mamba2") == torch.bfloat16
    assert state_dtype("qwen3-next") == torch.float32
    assert state_dtype("mamba2", replayssm_buffer_len=4) == torch.float32
    assert state_dtype("mamba2", replayssm_buffer_len=4, mamba_ssm_cache_dtype="bfloat16") == torch.bfloat16


def test_states_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(OutOfMemoryError, match=r"enough for max_num_seqs=2; lower max_num_seqs or raise"):
        engine("mamba2", max_num_seqs=40, kv_cache_memory_bytes=2 * 7168)
