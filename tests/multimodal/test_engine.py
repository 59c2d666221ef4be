"""Decoders with sight against transformers, through the engine: chunks, neighbours, prefixes, preemption, every depth."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from headway.core.config import Thresholds
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import run
from tests.multimodal.tiny_sight import (
    FAMILIES,
    VOCAB,
    arguments,
    film,
    hf_greedy,
    hf_inputs,
    hf_logits,
    picture,
    request,
    sighted,
)

KNOWS_TIMES = Version(version("transformers")) >= Version("5.20")
"""Before, transformers cut the seconds between parts of Qwen2.5's videos to whole ones."""
families = pytest.mark.parametrize("name", FAMILIES)
TURNS = {"gemma4": 0, "qwen2.5": 4, "mistral3": 1}
"""Families that run at every depth, and that which they run at every time."""


def prompts(name: str) -> list[list[Any]]:
    """Pictures first, last, beside each other but for a token, twice the same; and text alone. Some see videos, too."""
    one, two, three = picture(name, 1), picture(name, 2, larger=True), picture(name, 3)
    if name.startswith(("qwen", "gemma4")) and (name != "qwen2.5" or KNOWS_TIMES):
        short, long = film(name, 14, 2, 2.0), film(name, 15, 3, 1.25)
        return [*_prompts(one, two, three)[:1], [short, 3, one, 4, 5], *_prompts(one, two, three)[2:4],
                [30, two, 31, long, 32, one, 33]]  # fmt: skip
    return _prompts(one, two, three)


def _prompts(one: Any, two: Any, three: Any) -> list[list[Any]]:
    return [
        [5, one, 7, 8, two, 9],
        [one, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
        [5, one, 7, 8, three, 4],
        [30, two, 31, one, 32, one, 33],
    ]


def cache_rows(name: str) -> int:
    """Rows of an encoder cache that holds one picture, or those of a prompt that is seen whole."""
    return {"smolvlm": 32, "internvl": 8, "paligemma": 64}.get(name, 20)


def info_of(core: EngineCore) -> Any:
    assert core.info.vision is not None
    return core.info.vision


@families
def test_every_logit_is_that_of_transformers(name: str) -> None:
    one = sighted(name)
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    for number, parts in enumerate(prompts(name)[:3]):
        asked = request(info, f"r{number}", parts, max_tokens=4, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)
        answer = run(core, [asked])[f"r{number}"]
        assert answer.error is None
        ids, given = hf_inputs(one, info, parts)
        expected = hf_logits(one, ids + answer.token_ids[:-1], len(ids), given).log_softmax(-1)
        told = [*answer.prompt_logprobs, *answer.logprobs]
        assert len(told) == len(expected)
        for (tokens, values, _), row in zip(told, expected, strict=True):
            np.testing.assert_allclose(values, row[torch.tensor(tokens)], atol=1e-3)
    core.shutdown()


@pytest.mark.parametrize(
    ("name", "depth"),
    [*((name, 2) for name in FAMILIES), ("gemma3", 0), ("qwen3", 0),
     *(pytest.param(name, depth, marks=() if TURNS[name] == depth else pytest.mark.soak)
       for name in TURNS for depth in (0, 1, 4))],
)  # fmt: skip
def test_tokens_are_those_of_transformers(name: str, depth: int) -> None:
    """More requests than slots, of steps that are no longer than a picture needs, with prefixes and preemption. Beside rows
    that decode a step does one block of the tower."""
    one = sighted(name)
    core = build_engine(
        arguments(
            one.folder,
            run_ahead=depth,
            max_num_seqs=3,
            encoder_step_ratio=1e-9,
            max_num_batched_tokens=80 if name == "paligemma" else 24,
        ),
        progress=False,
        thresholds=Thresholds(encoder_cache_rows=cache_rows(name)),
    )
    info = info_of(core)
    batch = [request(info, f"{i}", prompts(name)[(i + 2) % 5], max_tokens=6 + i) for i in range(8)]
    answers = run(core, batch)
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts(name)[(i + 2) % 5], 6 + i), i
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("name", "depth"), [("gemma3", 4), ("gemma4", 2), ("qwen3", 1)])
def test_preempted_pictures_are_read_again(name: str, depth: int) -> None:
    """Blocks run out while requests decode; whoever comes back finds its picture, or has it encoded once more."""
    one = sighted(name)
    core = build_engine(
        arguments(
            one.folder,
            run_ahead=depth,
            max_model_len=96,
            kv_cache_memory_bytes=18 * 2048,
            enable_prefix_caching=False,
            encoder_step_ratio=1e-9,
        ),
        progress=False,
        thresholds=Thresholds(encoder_cache_rows=cache_rows(name)),
    )
    info = info_of(core)
    batch = [request(info, f"{i}", prompts(name)[i % 4], max_tokens=40) for i in range(5)]
    answers = run(core, batch)
    assert core.stats().num_preemptions
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == hf_greedy(one, info, prompts(name)[i % 4], 40), i
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize("name", ["gemma3", "paligemma", "llava"])
def test_another_picture_is_another_prefix(name: str) -> None:
    """Equal tokens behind another picture hit nothing of it; behind the same one they do, and with another salt not."""
    one = sighted(name)
    core = build_engine(arguments(one.folder), progress=False)
    info = info_of(core)
    tail = list(range(5, 25))
    first: list[Any] = [3, picture(name, 1), *tail]
    second: list[Any] = [3, picture(name, 2), *tail]
    for number, (parts, salt, hit) in enumerate(
        [
            (first, None, False),
            (second, None, False),
            (first, None, True),
            (second, "salt", False),
            (first[:-3], None, True),
        ]
    ):
        asked = request(info, f"{number}", parts, salt=salt)
        answer = run(core, [asked])[f"{number}"]
        assert answer.token_ids == hf_greedy(one, info, parts, 8), number
        whole = name != "paligemma" or parts is first
        assert (answer.num_cached_tokens >= 16) == (hit and whole), number
    core.shutdown()
