"""Replayed steps: which graph a mixture of features takes, and that it gives what eager sampling gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.messages import AddRequest
from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE
from headway.runner.graphs import (
    LOGPROB_ROWS,
    SEAMLESS_ROWS,
    WHOLE_STEP_VARIANTS,
    DecodeGraphs,
    decode_shape,
    few_buckets,
    row_buckets,
)
from headway.runner.launch import LaunchShape
from headway.runner.split_step import Replayed, SpareLogits, SplitStep, WholeStep, tail_variants
from headway.sampling.draw import ALL_PATHS, FILTERED
from headway.sampling.sampler import GRAMMAR_EDIT, Variant
from tests.engine.harness import request, run
from tests.engine.test_depths import FEATURES, close
from tests.sim.harness import expected, simulated
from tests.sim.rounding import TOLERANCE

EVERY = 0b11111


def _taken(variant: Variant) -> Variant | None:
    known = [*WHOLE_STEP_VARIANTS, *tail_variants(EVERY)]
    return next((each for each in known if each.covers(variant)), None)


@pytest.mark.parametrize("edits", [0, 1, 0b10100, EVERY])
@pytest.mark.parametrize(
    "flags", [0, PENALTIES, RANDOM, RANDOM | TOP, RANDOM | MIN_P | WIDE, RANDOM | TOP | WIDE | TWICE]
)
@pytest.mark.parametrize("logprobs", [-1, 0, 1, 5, 6, 20])
def test_every_mixture_has_a_graph(edits: int, flags: int, logprobs: int) -> None:
    taken = _taken(Variant(edits, flags, logprobs))
    assert taken is not None
    assert taken.edits & edits == edits and taken.flags & flags == flags
    assert (taken.max_logprobs < 0) == (logprobs < 0) and taken.max_logprobs >= logprobs


def test_the_common_mixtures_take_no_more_than_they_need() -> None:
    assert _taken(Variant()) == Variant()
    assert _taken(Variant(flags=RANDOM)) == Variant(flags=RANDOM)
    assert _taken(Variant(flags=RANDOM | TOP)) == Variant(flags=FILTERED)
    assert _taken(Variant(flags=PENALTIES)) == Variant(flags=FILTERED)
    assert _taken(Variant(flags=RANDOM | TOP | WIDE)) == Variant(flags=ALL_PATHS)
    assert _taken(Variant(4, RANDOM)) == Variant(EVERY - 1, FILTERED)
    assert _taken(Variant(5, RANDOM)) == Variant(EVERY, FILTERED)
    assert _taken(Variant(0, 0, 3)) == Variant(0, FILTERED, 5)
    assert _taken(Variant(0, 0, 21)) is None


def test_spare_logits_are_shared() -> None:
    spare = SpareLogits()
    large = spare.like(torch.zeros(8, 5))
    small = spare.like(torch.zeros(3, 5))
    assert large.shape == (8, 5) and small.shape == (3, 5) and small.data_ptr() == large.data_ptr()


def test_a_seamless_variant_records_the_front_half_again() -> None:
    behind: list[Any] = []

    def capture(body: Callable[[], object], *, first: Any = None, reused: bool = False) -> object:
        body()
        behind.append(first)
        return object()

    def front() -> tuple[Any, torch.Tensor]:
        fronts.append(1)
        return None, torch.zeros(2, 5)

    device: Any = SimpleNamespace(capture=capture, main=SimpleNamespace(active=nullcontext))
    fronts: list[int] = []
    backs: list[Variant] = []
    plain, edited = Variant(), Variant(GRAMMAR_EDIT, RANDOM)

    def back(batch: Any, logits: torch.Tensor, variant: Variant) -> list[Any]:
        backs.append(variant)
        return []

    SplitStep(device, front, back, [], SpareLogits(), [plain, edited], [edited])
    assert [each is None for each in behind] == [True, True, False, True]  # front half, copy, embedded, anew
    assert len(fronts) == 2 and backs == [plain, edited]


class Recorded:
    """A graph: what was recorded runs again, behind the graph before it."""

    def __init__(self, body: Callable[[], object], first: Recorded | None) -> None:
        self.body, self.first = body, first

    def replay(self) -> None:
        if self.first is not None:
            self.first.replay()
        self.body()


def parts_of(variant: Variant) -> list[Any]:
    return [f"parts of {variant.edits}"]


class Recording:
    """A device that captures, and a step of it: what ran, in order, after the captures."""

    def __init__(self) -> None:
        self.main = SimpleNamespace(active=nullcontext)
        self.ran: list[Any] = []

    def capture(self, body: Callable[[], object], *, first: Any = None, reused: bool = False) -> Recorded:
        body()
        return Recorded(body, first)

    def front(self) -> tuple[Any, torch.Tensor]:
        self.ran.append("front")
        return "batch", torch.zeros(2, 5)

    def back(self, batch: Any, logits: torch.Tensor, variant: Variant) -> list[Any]:
        assert batch == "batch" and logits.shape == (2, 5)
        self.ran.append(variant)
        return parts_of(variant)


@pytest.mark.parametrize("seamless", [False, True])
def test_a_replayed_step_runs_each_half_once(seamless: bool) -> None:
    """In one graph where there is one that covers it, else by a tail, else eagerly; it says whose parts it left."""
    device: Any = Recording()
    whole, tail = Variant(1), Variant(3, RANDOM)
    step = SplitStep(
        device, device.front, device.back, [tail], SpareLogits(), [whole], [whole] if seamless else []
    )  # fmt: skip
    beyond = Variant(7, RANDOM, 2)
    for asked, taken in ((Variant(), whole), (whole, whole), (Variant(2), tail), (tail, tail), (beyond, beyond)):
        device.ran.clear()
        assert step.replay(asked) == Replayed(parts_of(taken), taken)
        assert device.ran == ["front", taken], asked
        device.ran.clear()
        halves = tail if asked != beyond else beyond
        assert step.replay_halves(asked) == Replayed(parts_of(halves), halves)
        assert device.ran == ["front", halves], asked


def test_buckets_of_rows() -> None:
    """The largest is the most rows there can be, none is larger, and padding is bounded: by what each docstring says."""
    for most in (1, 2, 3, 4, 5, 8, 63, 64, 65, 250, 256, 257, 288, 300, 512):
        buckets = row_buckets(most)
        assert buckets[-1] == most and buckets == sorted(set(buckets)) and buckets[0] == 1
        for rows in range(1, most + 1):
            padded = next(bucket for bucket in buckets if bucket >= rows)
            step = 1 if rows <= 2 else 2 if rows <= 4 else 8 if rows <= 64 else 16 if rows <= 256 else 32
            assert padded == min(-(-rows // step) * step, most), (rows, most)
        few = few_buckets(most)
        assert few == sorted({most} | {2**k for k in range(10) if 2**k <= most})


def test_a_step_that_samples_nothing_is_one_graph_whatever_is_asked() -> None:
    device: Any = Recording()
    step = WholeStep(device, device.front, device.back)
    for asked in (Variant(), Variant(7, RANDOM, 2)):
        device.ran.clear()
        assert step.replay(asked) == Replayed(parts_of(Variant()), Variant())
        assert device.ran == ["front", Variant()]


def test_small_steps_with_grammars_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Any]] = []

    def note(device: Any, front: Any, back: Any, tails: Any, spare: Any, whole: Any, seamless: Any) -> None:
        made.append((front.args[0].rows, seamless))

    monkeypatch.setattr("headway.runner.graphs.SplitStep", note)
    nothing: Any = print
    shapes = [decode_shape(rows) for rows in (1, SEAMLESS_ROWS, SEAMLESS_ROWS + 8)]
    DecodeGraphs(nothing, nothing, nothing, shapes, []).capture(lambda shape: None)
    with_grammars = [variant for variant in WHOLE_STEP_VARIANTS if variant.edits & GRAMMAR_EDIT]
    assert made == [(SEAMLESS_ROWS + 8, []), (SEAMLESS_ROWS, with_grammars), (1, with_grammars)]


def _requests(params: list[dict[str, Any]]) -> list[AddRequest]:
    return [request(f"r{i}", [5 + i, 9, 11 * i + 1], seed=i, **dict(each)) for i, each in enumerate(params)]


@pytest.mark.parametrize(
    "names",
    [
        ["presence", "greedy", "top_p", "bad_words"],
        ["logit_bias", "logprobs", "allowed_token_ids", "logprobs_zero"],
        ["min_tokens", "repetition", "frequency", "all_filters", "logprob_token_ids"],
    ],
    ids=" ".join,
)
def test_mixtures_replay_and_never_sample_eagerly(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _requests([FEATURES[name] for name in names])
    with simulated(0, run_ahead=2) as (core, _, _):
        replayed = _count_replays(monkeypatch)
        answers = run(core, batch)
    known = {*WHOLE_STEP_VARIANTS, *tail_variants(EVERY)}  # eager steps say exactly what was asked
    assert replayed and known.issuperset(replayed)
    for request_id, answer in expected(batch).items():
        close(answers[request_id], answer, TOLERANCE)


def _count_replays(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    taken: list[Variant] = []
    replay = SplitStep.replay_halves

    def counted(self: SplitStep, variant: Variant) -> Replayed:
        done = replay(self, variant)
        taken.append(done.variant)
        return done

    monkeypatch.setattr(SplitStep, "replay_halves", counted)
    return taken


def test_more_logprobs_than_any_tail_has_are_sampled_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are a copy: the graph's own memory may be another graph's by then."""
    batch = _requests([{"logprobs": 20, "presence_penalty": 1.0}, {"logprob_token_ids": list(range(30))}, {}])
    with simulated(1, run_ahead=2) as (core, _, _):
        taken = _count_replays(monkeypatch)
        answers = run(core, batch)
    assert any(variant.max_logprobs == 30 for variant in taken)
    for request_id, answer in expected(batch).items():
        close(answers[request_id], answer, TOLERANCE)


@pytest.mark.parametrize("most_rows", [LOGPROB_ROWS, 1])
def test_few_logprobs_of_few_rows_take_one_graph(most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runner.graphs.LOGPROB_ROWS", most_rows)
    batch = _requests([{"logprobs": 5}, {"logprobs": 0, "temperature": 0.8, "top_k": 9}, {}])
    in_two: list[bool] = []
    replay_decode = DecodeGraphs.replay
    with simulated(2, run_ahead=2) as (core, _, _):
        split = _count_replays(monkeypatch)

        def counted(self: DecodeGraphs, shape: LaunchShape, variant: Variant) -> Replayed:
            before = len(split)
            done = replay_decode(self, shape, variant)
            assert done.variant == Variant(0, FILTERED, 5) or variant.max_logprobs < 0
            in_two.append(len(split) > before)
            return done

        monkeypatch.setattr(DecodeGraphs, "replay", counted)
        answers = run(core, batch)
    assert in_two and any(in_two) == (most_rows == 1)
    for request_id, answer in expected(batch).items():
        close(answers[request_id], answer, TOLERANCE)
