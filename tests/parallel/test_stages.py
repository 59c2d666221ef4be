"""Stages whose steps are graphs: exchanges stand between them, and tokens are those of one rank, kernel by kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats
from headway.engine.core import EngineCore
from headway.engine.draft_pacer import DraftPacer
from headway.engine.warm_up import hidden_from
from headway.runner.batch_buffers import BatchBuffers
from headway.runner.graphs import decode_shapes
from headway.runner.launch import Launch, LaunchShape
from headway.runner.relay import Relay
from headway.runner.step_body import StepBody
from headway.sampling.sampler import Variant
from headway.state.batch import StepBatch
from tests.engine.harness import Answer, request
from tests.engine.tiny_llama import CONFIG, KV_BLOCK_BYTES
from tests.parallel.families import write
from tests.parallel.test_engine import THREADS, all_features, compare, played

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_cached_requests": 3}
TWO, THREE = ({**THREADS, "distributed_timeout_seconds": 20, "pipeline_parallel_size": size} for size in (2, 3))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four layers."""
    folder = tmp_path_factory.mktemp("deep")
    write(CONFIG | {"num_hidden_layers": 4}, folder)
    return folder


def answers_of(model: Path, made: list[AddRequest], **more: Any) -> tuple[dict[str, Answer], EngineStats]:
    """Of an engine of its own, which has seen nothing before."""
    sizes: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 6, "block_size": 8,
        "max_num_batched_tokens": 32, "run_ahead": 0, "kv_cache_memory_bytes": 192 * KV_BLOCK_BYTES,
    }  # fmt: skip
    return played(EngineArgs(**sizes | more), made)


def when_started(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Call it when engines are ready, which have run steps of nobody by then."""
    learn = EngineCore.learn

    def called(core: EngineCore, vocabulary: Vocabulary) -> None:
        do()
        learn(core, vocabulary)

    monkeypatch.setattr(EngineCore, "learn", called)


def alike(number: int, **params: Any) -> list[AddRequest]:
    """Prompts that repeat themselves, so that much is guessed, and answers of different lengths."""
    prompts = [[7, 8, 9, i % 3, 7, 8, 9, i % 3, 7, 8] for i in range(number)]
    return [request(f"r{i}", prompt, max_tokens=14 + i, seed=i % 3, **params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("depth", "seed"), [(0, 21), (1, 22), (2, 23), (4, 24)])
def test_graphs_of_stages_at_every_depth(deep_model: Path, depth: int, seed: int) -> None:
    """Every feature, grammars among them, and prompts of several chunks."""
    made = all_features()[depth % 3 :: 3]
    wanted, _ = answers_of(deep_model, made)
    found, stats = answers_of(deep_model, made, device=f"sim:{seed}", run_ahead=depth, **TWO)
    compare(found, wanted)
    assert stats.num_graph_steps > stats.num_steps / 2


@pytest.mark.parametrize("kernels", [False, True], ids=["graphs", "kernels"])
def test_a_stage_between_two(deep_model: Path, kernels: bool) -> None:
    made = all_features()[::4]
    wanted, _ = answers_of(deep_model, made)
    found, stats = answers_of(deep_model, made, device="sim:25", run_ahead=2, enforce_eager=kernels, **THREE)
    compare(found, wanted)
    assert (stats.num_graph_steps == 0) == kernels


@pytest.mark.parametrize(
    ("depth", "drafts", "temperature"),
    [(2, NGRAM, 0.9), (1, SUFFIX, 0.0), *(pytest.param(0, each, 0.0, marks=pytest.mark.soak) for each in (NGRAM, SUFFIX)),
     *(pytest.param(4, each, 0.9, marks=pytest.mark.soak) for each in (NGRAM, SUFFIX))],
)  # fmt: skip
def test_drafts_in_graphs_of_stages(deep_model: Path, depth: int, drafts: dict[str, Any], temperature: float) -> None:
    """More requests than rows: some end while others are under way, and later ones find what these have left."""
    made = alike(13, temperature=temperature)
    wanted, _ = answers_of(deep_model, made)
    more = {"speculative_config": drafts, "run_ahead": depth, "device": f"sim:{26 + depth}"}
    found, stats = answers_of(deep_model, made, **more, **TWO)
    compare(found, wanted)
    assert stats.num_graph_steps and stats.num_accepted_tokens > 0


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafts", [NGRAM, SUFFIX], ids=lambda drafts: drafts["method"])
def test_all_stages_run_the_same_tokens(
    deep_model: Path, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Any], depth: int
) -> None:
    """Drafts among them: an earlier stage is told them when later steps have been unpacked already, whose rows are others, and
    steps have more drafts and fewer."""
    seen: dict[int, list[list[tuple[int, list[int]]]]] = {}
    unpack, observed = BatchBuffers.unpack, itertools.count()

    def noted(buffers: BatchBuffers, packed: torch.Tensor, **sizes: Any) -> StepBatch:
        batch = unpack(buffers, packed, **sizes)
        ids, starts = batch.input_ids.tolist(), batch.query_start.tolist()
        rows = zip(batch.row_slots.tolist(), batch.seq_lens.tolist(), itertools.pairwise(starts), strict=True)
        seen.setdefault(id(buffers), []).append(
            [(slot, ids[first:end]) for slot, length, (first, end) in rows if length]
        )
        return batch

    def in_turns(pacer: DraftPacer, width: int, reached: Any, step_us: float | None) -> int:
        pacer.width = pacer._widths[next(observed) // 3 % len(pacer._widths)]
        return pacer.width

    when_started(monkeypatch, seen.clear)
    monkeypatch.setattr(BatchBuffers, "unpack", noted)
    monkeypatch.setattr(DraftPacer, "observe", in_turns)
    made = alike(9, temperature=0.0)
    _, stats = answers_of(
        deep_model, made, speculative_config=drafts, run_ahead=depth, max_num_seqs=5, max_num_batched_tokens=21, **TWO
    )
    one, other = seen.values()
    assert one == other and len(one) > 20
    assert stats.num_accepted_tokens > 0


def test_synthetic_acceptance_is_the_last_stages(deep_model: Path) -> None:
    """What is accepted by a rate goes back as what was drawn: all stages go on alike, and rows bring as many tokens."""
    drafts = NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    made = alike(6, temperature=0.0, ignore_eos=True)
    both = [answers_of(deep_model, made, speculative_config=drafts, **more) for more in ({}, TWO)]
    assert [len(found[each.request_id].token_ids) for found, _ in both for each in made] == [
        14 + i for i in range(6)
    ] * 2
    rates = [stats.num_accepted_tokens / stats.num_draft_tokens for _, stats in both]
    assert rates[1] == pytest.approx(rates[0], abs=0.1) and rates[1] > 0.3


def test_a_decode_step_of_a_stage_is_graphs_and_exchanges(deep_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the step nor what is done with its tokens later is launched kernel by kernel."""
    one_by_one: list[LaunchShape] = []
    eager, move_on = StepBody.eager, Relay._move_on

    def steps(body: StepBody, launch: Launch, variant: Variant, counted: bool) -> Any:
        one_by_one.append(launch.shape)
        return eager(body, launch, variant, counted)

    def tokens(relay: Relay, body: StepBody, kept: torch.Tensor, shape: LaunchShape, variant: Variant) -> None:
        one_by_one.append(shape)
        move_on(relay, body, kept, shape, variant)

    when_started(monkeypatch, one_by_one.clear)
    monkeypatch.setattr(StepBody, "eager", steps)
    monkeypatch.setattr(Relay, "_move_on", tokens)
    drafts = {"speculative_config": NGRAM}
    for more in ({}, drafts):
        _, stats = answers_of(deep_model, alike(6, temperature=0.0), device="sim:31", run_ahead=2, **more, **THREE)
        assert not [shape for shape in one_by_one if shape.only_decode]
        assert stats.num_graph_steps == stats.num_steps


def test_a_rehearsal_moves_no_slot(deep_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What will be captured runs once before, in the midst of requests here, and finds no rows."""
    note, rehearsed = Relay.note, list[Relay]()

    def noted(relay: Relay, body: StepBody, shape: LaunchShape, variant: Variant) -> None:
        note(relay, body, shape, variant)
        before = body._arena.ints.clone()
        relay.rehearse(body, decode_shapes(6, (1, 4)))
        assert torch.equal(body._arena.ints, before)
        rehearsed.append(relay)

    monkeypatch.setattr(Relay, "note", noted)
    made = all_features()[::5]
    found, _ = answers_of(deep_model, made, speculative_config=NGRAM, **TWO)
    compare(found, answers_of(deep_model, made)[0])
    assert rehearsed


def test_launches_of_a_stage_are_hidden_by_its_own_layers() -> None:
    whole: Any = SimpleNamespace(num_layers=32, layer_weights=8_000, stage=None)
    half: Any = SimpleNamespace(num_layers=32, layer_weights=4_000, stage=SimpleNamespace(own=range(16)))
    assert hidden_from(half) == hidden_from(whole)
