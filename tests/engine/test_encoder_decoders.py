"""Encoder-decoders against transformers: tokens and log-probabilities, mixed, cached, preempted, at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway.core.errors import ConfigError
from headway.engine.boot import build_engine
from tests.engine.harness import run
from tests.engine.tiny_encoder_decoders import (
    OUTPUTS,
    START,
    VOCAB,
    arguments,
    features,
    greedy,
    logprobs,
    reader,
    recording,
    request,
    save,
    text,
    whisper,
)
from tests.sim.harness import simulated

PROMPTS = [[START], [START, 5, 9], [START, 7], [START, 5, 9, 11, 40, 41, 42, 43, 44, 45], [START, 8]]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    model = whisper()
    return model, save(model, tmp_path_factory.mktemp("whisper"))


def heard(model: Any, seed: int, prompt: list[int], count: int = 12) -> list[int]:
    return greedy(model, {"input_features": torch.from_numpy(features(seed))[None]}, prompt, count)


def test_every_logit_is_that_of_transformers(hearing: tuple[Any, str]) -> None:
    model, folder = hearing
    core = build_engine(arguments(folder, max_logprobs=VOCAB), progress=False)
    prompt = PROMPTS[3]
    answer = run(core, [request("a", recording(1), prompt, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)])["a"]
    assert answer.error is None
    tokens = prompt + answer.token_ids
    expected = logprobs(model, {"input_features": torch.from_numpy(features(1))[None]}, tokens[:-1])
    told = [*answer.prompt_logprobs, *answer.logprobs]
    for (ids, values, _), row in zip(told, expected, strict=True):
        assert len(set(ids)) >= VOCAB - 1
        np.testing.assert_allclose(values, row[torch.tensor(ids)], atol=1e-3)
    core.shutdown()


ROOM = {"roomy": 400, "preempting": 13}
"""Blocks."""


def rooms_and_depths() -> list[Any]:
    """Each depth with one pool, two with both; the others with the long sweeps."""
    often = {("roomy", 1), ("roomy", 2), ("preempting", 0), ("preempting", 2), ("preempting", 4)}
    return [
        pytest.param(depth, blocks, id=f"{room}-{depth}", marks=() if (room, depth) in often else pytest.mark.soak)
        for room, blocks in ROOM.items()
        for depth in (0, 1, 2, 4)
    ]


@pytest.mark.parametrize(("depth", "blocks"), rooms_and_depths())
def test_tokens_are_those_of_transformers(hearing: tuple[Any, str], depth: int, blocks: int) -> None:
    """More requests than slots, some on the same recording, chunks of three tokens; with few blocks they preempt each other."""
    model, folder = hearing
    block_bytes = 3 * 2 * 8 * 32 * 4
    core = build_engine(
        arguments(
            folder, run_ahead=depth, kv_cache_memory_bytes=blocks * block_bytes, max_num_seqs=3,
            max_num_batched_tokens=4,
        ),
        progress=False,
    )  # fmt: skip
    batch = [request(f"{i}", recording(i % 3), PROMPTS[i % 5], max_tokens=12 + i) for i in range(8)]
    answers = run(core, batch)
    assert (core.stats().num_preemptions > 0) == (blocks == 13)
    for i, each in enumerate(batch):
        assert answers[each.request_id].token_ids == heard(model, i % 3, PROMPTS[i % 5], 12 + i), i
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("depth", "graphs"), [(1, False), (2, True)])
def test_on_the_simulated_device(hearing: tuple[Any, str], depth: int, graphs: bool) -> None:
    """No wait, no read ahead of the encoder, with aborts while rows are in flight and few blocks."""
    model, folder = hearing
    sizes = {"max_num_batched_tokens": 12, "max_model_len": 48, "max_num_seqs": 3, "kv_cache_memory_bytes": 13 * 6144}
    extra = {"model": folder, "skip_tokenizer_init": True}
    with simulated(depth + 3, run_ahead=depth, enforce_eager=not graphs, **sizes, **extra) as (core, _, watch):
        batch = [request(f"{i}", recording(i % 4), PROMPTS[i % 5], max_tokens=14 + i) for i in range(9)]
        for each in batch[:3]:
            core.add(each)
        core.step()
        core.abort("1")
        answers = run(core, batch[3:])
        assert watch.num_steps == core.stats().num_steps and (core.stats().num_graph_steps > 0) == graphs
        assert core.stats().num_preemptions > 0
    for i in (3, 4, 5, 6, 7, 8):
        assert answers[f"{i}"].token_ids == heard(model, i % 4, PROMPTS[i % 5], 14 + i), i


READERS = ["bart", "mbart", "t5", "flan-t5", "mt5"]
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [40], list(range(20, 60)), [12, 13] * 9, [33, 2]]


@pytest.fixture(scope="module", params=READERS)
def reading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    model = reader(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def test_readers_logits_are_those_of_transformers(reading: tuple[Any, str]) -> None:
    model, folder = reading
    core = build_engine(arguments(folder, max_logprobs=VOCAB), progress=False)
    prompt = PROMPTS[3]
    asked = [request(f"{i}", text(each), prompt, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1, max_tokens=20)
             for i, each in enumerate(TEXTS)]  # fmt: skip
    answers = run(core, asked)
    for i, each in enumerate(TEXTS):
        answer = answers[f"{i}"]
        assert answer.error is None
        expected = logprobs(model, {"input_ids": torch.tensor([each])}, [*prompt, *answer.token_ids][:-1])
        for (ids, values, _), row in zip([*answer.prompt_logprobs, *answer.logprobs], expected, strict=True):
            np.testing.assert_allclose(values, row[torch.tensor(ids)], atol=1e-3)
    core.shutdown()


@pytest.mark.parametrize("depth", [0, 2])
def test_readers_go_on_as_transformers_do(reading: tuple[Any, str], depth: int) -> None:
    """Mixed, in chunks, with few blocks."""
    model, folder = reading
    width = 3 * 2 * 8 * (48 if "t5" in folder else 32) * 4
    core = build_engine(
        arguments(folder, run_ahead=depth, kv_cache_memory_bytes=16 * width, max_num_seqs=3, max_num_batched_tokens=5),
        progress=False,
    )
    batch = [request(f"{i}", text(TEXTS[i % 5]), PROMPTS[(i + i // 5) % 5], max_tokens=14 + i) for i in range(8)]
    answers = run(core, batch)
    for i, each in enumerate(batch):
        inputs = {"input_ids": torch.tensor([TEXTS[i % 5]])}
        expected = greedy(model, inputs, each.prompt_token_ids, 14 + i)
        assert answers[f"{i}"].token_ids == expected, i
    core.check_integrity()
    core.shutdown()


def test_a_reader_on_the_simulated_device(tmp_path: Path) -> None:
    """Texts of many lengths in one step's encoding, and a bias by distance."""
    model = reader("t5")
    sizes = {"max_num_batched_tokens": 12, "max_model_len": 48, "max_num_seqs": 3, "kv_cache_memory_bytes": 18 * 9216}
    extra = {"model": save(model, tmp_path), "skip_tokenizer_init": True}
    with simulated(4, run_ahead=2, **sizes, **extra) as (core, _, watch):
        batch = [request(f"{i}", text(TEXTS[i % 5]), PROMPTS[i % 5]) for i in range(6)]
        answers = run(core, batch)
        assert watch.num_steps == core.stats().num_steps
    for i in range(6):
        expected = greedy(model, {"input_ids": torch.tensor([TEXTS[i % 5]])}, PROMPTS[i % 5], 12)
        assert answers[f"{i}"].token_ids == expected, i


def test_what_cannot_be_served_is_refused(hearing: tuple[Any, str]) -> None:
    _, folder = hearing
    core = build_engine(arguments(folder), progress=False)
    longer = msgspec.structs.replace(recording(0), rows=OUTPUTS + 1)
    none = request("none", recording(0), [START])
    none.media = []
    two = request("two", recording(0), [START])
    two.media = [recording(0), recording(1)]
    answers = run(core, [none, two, request("long", longer, [START]), request("good", recording(0), [START])])
    assert [answers[name].error_parameter for name in ("none", "two", "long", "good")] == ["media"] * 3 + [None]
    core.shutdown()
    with pytest.raises(ConfigError, match="drafts"):
        build_engine(
            arguments(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2}), progress=False
        )
    with pytest.raises(ConfigError, match="cannot pool"):
        build_engine(arguments(folder, runner="pooling"), progress=False)
