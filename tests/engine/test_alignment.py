"""When tokens are heard: the frames are those that transformers' parts give, mixed with other requests, at every depth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.attention.alignment import first_frames, smoothed
from headway.core.hearing import Alignment
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.hearing import alignment_heads
from tests.engine.harness import run
from tests.engine.test_encoder_decoders import PROMPTS, heard, rooms_and_depths
from tests.engine.tiny_encoder_decoders import (
    EOS,
    OUTPUTS,
    START,
    arguments,
    features,
    frames_of,
    recording,
    request,
    save,
    whisper,
)
from tests.sim.harness import simulated

HEADS = [[2, 0], [0, 3], [2, 2]]
TEXTS = [[5, 9, 7, 11, 40, 41, 42], [8], [5, 9, 11, 40, 41, 42, 43, 44, 45, 46, 60, 61, 62], [33, 2, 33]]
FRAMES = [OUTPUTS, 17, 3, 26]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    model = whisper()
    model.generation_config.alignment_heads = HEADS
    folder = save(model, tmp_path_factory.mktemp("whisper"))
    model.set_attn_implementation("eager")
    return model, folder


def placed(name: str, number: int) -> AddRequest:
    """A request for the times of a text."""
    made = request(name, recording(number % 3), [START, 70, *TEXTS[number % 4], EOS], max_tokens=1)
    made.align = Alignment(first=1, frames=FRAMES[number % 4])
    return made


def expected(model: Any, asked: AddRequest, seed: int) -> list[int]:
    """What transformers' parts make of the request."""
    assert asked.align is not None
    mel = torch.from_numpy(features(seed))
    return frames_of(model, mel, asked.prompt_token_ids, HEADS, asked.align.first, asked.align.frames)


def mixed() -> tuple[list[AddRequest], dict[str, int]]:
    """Transcripts and times, and which of these is of which recording; first a text whose beginning the times share."""
    batch = [request("same", recording(0), [START, 70, *TEXTS[0]], max_tokens=9)]
    numbers = {f"t{i}": i for i in range(8)}
    for name, i in numbers.items():
        batch += [placed(name, i), request(f"g{i}", recording(i % 3), PROMPTS[i % 5], max_tokens=14 + i)]
    return batch, numbers


def check(model: Any, batch: list[AddRequest], numbers: dict[str, int], answers: Any) -> None:
    for each in batch:
        answer = answers[each.request_id]
        assert answer.error is None
        if each.align is None:
            assert answer.aligned is None
            continue
        i = numbers[each.request_id]
        assert answer.num_cached_tokens == 0 and len(answer.token_ids) == 1
        assert answer.aligned == expected(model, each, i % 3), each.request_id


@pytest.mark.parametrize(("depth", "blocks"), rooms_and_depths())
def test_frames_are_those_of_transformers(hearing: tuple[Any, str], depth: int, blocks: int) -> None:
    """Steps have room for one text and a little more; other requests decode beside it, and have cached what it begins with."""
    model, folder = hearing
    sizes = {"kv_cache_memory_bytes": blocks * 3 * 2 * 8 * 32 * 4, "max_num_seqs": 3, "max_num_batched_tokens": 18}
    core = build_engine(arguments(folder, run_ahead=depth, **sizes), progress=False)
    batch, numbers = mixed()
    answers = run(core, batch)
    assert (core.stats().num_preemptions > 0) == (blocks == 13)
    check(model, batch, numbers, answers)
    for i in range(8):
        assert answers[f"g{i}"].token_ids == heard(model, i % 3, PROMPTS[i % 5], 14 + i)
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("depth", "graphs"), [(1, False), (3, True)])
def test_on_the_simulated_device(hearing: tuple[Any, str], depth: int, graphs: bool) -> None:
    """No wait, and nothing read ahead of the encoder or behind the blocks' next owner."""
    model, folder = hearing
    sizes = {"max_num_batched_tokens": 18, "max_model_len": 48, "max_num_seqs": 3, "kv_cache_memory_bytes": 13 * 6144}
    extra = {"model": folder, "skip_tokenizer_init": True}
    with simulated(depth + 3, run_ahead=depth, enforce_eager=not graphs, **sizes, **extra) as (core, _, watch):
        batch, numbers = mixed()
        for each in batch[:4]:
            core.add(each)
        core.step()
        core.abort("t0")
        answers = run(core, batch[4:])
        assert watch.num_steps == core.stats().num_steps and (core.stats().num_graph_steps > 0) == graphs
    check(model, batch[4:], numbers, answers)


def test_what_cannot_be_placed_is_refused(hearing: tuple[Any, str]) -> None:
    _, folder = hearing
    core = build_engine(arguments(folder, max_num_batched_tokens=12), progress=False)
    wrong = {"behind": Alignment(first=3, frames=3), "before": Alignment(first=-1, frames=3),
             "none": Alignment(first=1, frames=0), "more": Alignment(first=1, frames=OUTPUTS + 1)}  # fmt: skip
    batch = [placed("good", 1), placed("long", 2)]
    for name, align in wrong.items():
        batch.append(placed(name, 1))
        batch[-1].align = align
    batch.append(placed("longer", 1))
    batch[-1].params = replace(batch[-1].params, max_tokens=2)
    answers = run(core, batch)
    assert {name for name, each in answers.items() if each.error_parameter == "align"} == {"long", "longer", *wrong}
    assert "max_num_batched_tokens" in (answers["long"].error or "") and answers["good"].aligned is not None
    core.shutdown()


@pytest.mark.parametrize(
    ("named", "heads"),
    [([[1, 3], [0, 2]], [(1, 3), (0, 2)]), ([[1, 3], [7, 0], [0, 4], [-1, 0]], [(1, 3)]),
     ([[9, 9], "x", [1], [1.0, 0]], None), (None, None), ("x", None)],
)  # fmt: skip
def test_which_heads_are_asked(hearing: tuple[Any, str], named: Any, heads: Any) -> None:
    """Without any that the model has: the upper half of three layers, of four heads."""
    core = build_engine(arguments(hearing[1]), progress=False)
    told: Any = SimpleNamespace(generation_config={"alignment_heads": named}, config={})
    found = alignment_heads(core._runner.executor.body.model, told)
    core.shutdown()
    assert list(found) == (heads or [(layer, head) for layer in (1, 2) for head in range(4)])


def test_the_median_is_in_the_middle() -> None:
    """By the zero-one principle: what sorts all rows of zeros and ones sorts everything."""
    rows = torch.tensor([[float(n >> i & 1) for i in range(7)] for n in range(128)])
    assert torch.equal(smoothed(rows[:, None])[:, 0, 3], rows.median(1).values)
    for frames in (1, 3):
        x = torch.randn(2, 3, frames)
        assert torch.equal(smoothed(x), x)


def test_tokens_that_look_at_everything_alike_get_times(hearing: tuple[Any, str], tmp_path: Path) -> None:
    """Heads that tell nothing divide by nothing."""
    model = whisper()
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.encoder_attn.q_proj.weight.zero_()
            layer.encoder_attn.q_proj.bias.zero_()
    core = build_engine(arguments(save(model, tmp_path)), progress=False)
    answer = run(core, [placed("a", 0)])["a"]
    assert answer.aligned is not None and answer.aligned == sorted(answer.aligned) and answer.aligned[-1] < OUTPUTS
    core.shutdown()


def test_heads_may_be_looked_at_one_by_one() -> None:
    """As few weights at once as one head has, or all of them: the same frames."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(5, 9, 8, generator=generator), torch.randn(5, 24, 8, generator=generator)
    together = first_frames(q, k, 0.5, 1)
    for most in (1, 2 * 9 * 24, 5 * 9 * 24 - 1):
        assert torch.equal(first_frames(q, k, 0.5, 1, most_weights=most), together)
