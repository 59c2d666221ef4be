"""Limits from both sides, of two sources the one that counts, and values that look like nothing but were given."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.api.frontend import load_pictures
from headway.api.inputs import Door
from headway.api.output_processor import OutputProcessor
from headway.api.pictures.door import DEFAULT_LIMITS
from headway.api.pooling.score import _cut, max_sim, similarities
from headway.api.structured import integers
from headway.api.structured.nfa import Nfa
from headway.api.structured.regex import RefusedError, full_match
from headway.core.config import EngineArgs
from headway.core.errors import InvalidRequestError
from headway.core.messages import RequestUpdate, TokenLogprobsRow
from headway.core.params import MAX_PROMPT_NAME_CHARS, PoolingParams, SamplingParams
from tests.api.fakes import ByteTokenizer
from tests.api.test_inputs import door
from tests.engine.fake_core import model_info

LONG = "n" * MAX_PROMPT_NAME_CHARS
TAKEN: dict[str, list[Any]] = {
    "dimensions": [None, 1, 2**20],
    "normalize": [None, True, False],
    "use_activation": [None, True, False],
    "truncate_prompt_tokens": [None, -1, 1, 2**31 - 1],
    "truncation_side": [None, "left", "right"],
    "prompt_name": [None, "", LONG],
    "task": [None, "", LONG],
}
REFUSED: dict[str, list[Any]] = {
    "dimensions": [0, -1, 2**20 + 1, True, 1.0, "1"],
    "normalize": [0, 1, "true"],
    "use_activation": [0, 1, "true"],
    "truncate_prompt_tokens": [0, -2, 2**31, True, 1.0, "1"],
    "truncation_side": ["Left", "", "both", 1],
    "prompt_name": [LONG + "n", 1, b"a"],
    "task": [LONG + "n", 1, b"a"],
}


def test_every_field_of_pooling_has_its_limits_here() -> None:
    assert {*TAKEN} == {*REFUSED} == {field.name for field in fields(PoolingParams)}


@pytest.mark.parametrize("field", TAKEN)
def test_limits_of_pooling_parameters(field: str) -> None:
    for value in TAKEN[field]:
        assert getattr(PoolingParams(**{field: value}), field) == value
    for value in REFUSED[field]:
        with pytest.raises(InvalidRequestError) as caught:
            PoolingParams(**{field: value})
        assert caught.value.parameter == field


@pytest.mark.parametrize("of_call", [None, "call's"])
@pytest.mark.parametrize("own", [None, "prompt's"])
def test_a_prompts_own_salt_goes_before_the_calls(own: str | None, of_call: str | None) -> None:
    prompt: Any = {"prompt_token_ids": [1, 2]} | ({} if own is None else {"cache_salt": own})
    [child] = door().prepare(prompt, SamplingParams(), cache_salt=of_call).children
    assert child.cache_salt == (of_call if own is None else own)


@pytest.mark.parametrize("prompt", [1, 9, 30, 31])
def test_min_tokens_may_fill_the_context(prompt: int) -> None:
    room = 32 - prompt
    child = door().prepare([1] * prompt, SamplingParams(min_tokens=room, max_tokens=None)).children[0]
    assert (child.params.min_tokens, child.params.max_tokens) == (room, room)
    with pytest.raises(InvalidRequestError, match="does not fit"):
        door().prepare([1] * prompt, SamplingParams(min_tokens=room + 1, max_tokens=None))


CHANGED: dict[str, tuple[Any, Any]] = {
    "logit_bias": ({3: 1.0}, {4: 1.0}),
    "allowed_token_ids": ([3], [4]),
    "stop_token_ids": ([3], [4]),
    "logprob_token_ids": ([3], [4]),
    "bad_words": (["a"], ["b"]),
    "stop": (["a"], ["b"]),
}
"""Every field that is a list or a table: what it held, and what the caller puts into the same object later."""


def test_every_table_of_a_request_is_listed() -> None:
    tables = [field.name for field in fields(SamplingParams) if re.match("list|dict", str(field.type))]
    assert {*tables} <= {*CHANGED}


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_caller_changes_between_two_requests_counts_for_the_second(name: str) -> None:
    """The door remembers the last parameters it has seen; a table in them may be changed in its place."""
    subject, (before, after) = door(), CHANGED[name]
    params = SamplingParams(**{name: before})
    held = getattr(params, name)
    first = subject.prepare([1, 2], params)
    seen = repr(first.children[0].params), first.children[0].bad_words_token_ids
    held.clear()
    held.update(after) if isinstance(held, dict) else held.extend(after)
    second = subject.prepare([1, 2], params)
    fresh = door().prepare([1, 2], replace(params))
    assert second.children[0].params == fresh.children[0].params
    assert second.children[0].params is not first.children[0].params, "who knows the one takes it for the other"
    assert second.children[0].bad_words_token_ids == fresh.children[0].bad_words_token_ids
    assert second.params == fresh.params and getattr(second.params, name) == after
    if name not in ("allowed_token_ids", "logprob_token_ids", "logit_bias", "stop_token_ids"):
        assert (repr(first.children[0].params), first.children[0].bad_words_token_ids) == seen


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_every_field_of_an_update_arrives() -> None:
    """Each with a value of its own; ``queue_seconds`` is for the figures, and vectors are other requests'."""
    tokenizer: Any = ByteTokenizer()
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(logprobs=0, prompt_logprobs=0, stop_token_ids=[66])
    request = processor.open(Door(model_info(), tokenizer).prepare("p", params), "name")
    sent: dict[str, Any] = {
        "new_token_ids": [65, 66], "new_logprobs": [TokenLogprobsRow([65], [-0.5], 1), TokenLogprobsRow([66], [-1.5], 2)],
        "new_prompt_logprobs": [TokenLogprobsRow([112], [-2.5], 3)], "finish_reason": "error", "stop_token_id": 66,
        "num_cached_tokens": 5, "error": "broken", "error_parameter": "seed", "aligned": [0, 7],
    }  # fmt: skip
    assert {*sent} == {*RequestUpdate.__struct_fields__} - {"request_id", "queue_seconds", "pooled"}
    processor.apply([RequestUpdate(request_id="0-0", **sent)])
    for output in (request.snapshot(), request.delta()):
        [part] = output.outputs
        assert (part.token_ids, part.finish_reason, part.stop_reason) == ([65, 66], "error", 66)
        assert (
            part.logprobs is not None and output.prompt_logprobs is not None and output.prompt_logprobs[1] is not None
        )
        assert [next(iter(row.values())).logprob for row in part.logprobs] == [-0.5, -1.5]
        assert [next(iter(row.values())).rank for row in part.logprobs] == [1, 2]
        assert (output.prompt_logprobs[1][112].logprob, output.prompt_logprobs[1][112].rank) == (-2.5, 3)
        assert (output.num_cached_tokens, output.error, output.error_parameter) == (5, "broken", "seed")
        assert output.aligned == [0, 7] and output.finished


@pytest.mark.parametrize("given", [None, {}, {"image": 1}, {"video": 7}, {"image": 0, "video": 9}])
def test_limits_that_are_given_go_before_the_usual_ones(
    given: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen: list[Any] = []
    monkeypatch.setattr("headway.api.pictures.door.Pictures", lambda *arguments: seen.append(arguments[5]))
    monkeypatch.setattr("headway.weights.source.locate", lambda *_, **__: SimpleNamespace(path=tmp_path))
    info: Any = SimpleNamespace(vision=object(), sound=None, architecture="x")
    load_pictures(EngineArgs(model="m", limit_mm_per_prompt=given), info, None)
    assert seen == [dict(DEFAULT_LIMITS) | (given or {})]


# -- structured outputs ------------------------------------------------------------------------------------------------


def test_multiples_within_any_bounds() -> None:
    """Against a filter over all integers near: all where they are few; else the nearest to the lower bound, or to zero."""
    most = integers.MAX_MULTIPLES
    for of, low, high in itertools.product((1, 3, 7), (-9, -1, 0, 1, 8), (-8, -1, 0, 1, 20)):
        assert integers.multiples(of, low, high) == [n for n in range(low, high + 1) if n % of == 0]
    for low, high in (
        (-(10**6), 0),
        (-(10**6), -1),
        (-(10**6), 5),
        (-5, 10**6),
        (0, 10**6),
        (3, 10**6),
        (-(10**6), 10**6),
    ):
        found = integers.multiples(2, low, high)
        assert len(found) <= most and found == sorted({*found})
        assert all(low <= each <= high and each % 2 == 0 for each in found)
        if low <= 0 <= high and low < 0:
            assert 0 in found, (low, high)
        if low >= 0:
            assert found[0] == low + low % 2
    assert {0, -2} <= {*integers.multiples(2, None, 0)} and {0, 2} <= {*integers.multiples(2, 0, None)}


def accepts(pattern: str) -> bool:
    try:
        full_match(Nfa(), 0, pattern)
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize("piece", ["^a", "a$", "^a$", "^", "$"])
@pytest.mark.parametrize("repeat", ["", "?", "*", "+", "{1}", "{0,1}", "{2}", "{1,2}"])
def test_an_anchor_holds_where_what_it_stands_in_can_come_once(piece: str, repeat: str) -> None:
    assert accepts(f"({piece}){repeat}") == (repeat in ("", "?", "{1}", "{0,1}"))


# -- pairs of texts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_pair_the_longer_text_is_cut_and_both_on_the_same_side(side: str) -> None:
    """Token by token from the longer one, as "longest_first" has it; of equal ones the same, give or take the odd token."""
    for one, two, room in itertools.product(range(7), range(7), range(13)):
        first, second = [100 + i for i in range(one)], [200 + i for i in range(two)]
        kept = _cut(first, second, room, side)
        lengths = [one, two]
        while sum(lengths) > room:
            lengths[lengths.index(max(lengths))] -= 1
        assert sorted(map(len, kept)) == sorted(lengths), (one, two, room)
        for whole, part in zip((first, second), kept, strict=True):
            assert part == (whole[len(whole) - len(part) :] if side == "left" else whole[: len(part)])


def test_scores_are_what_they_are_called() -> None:
    rng = np.random.default_rng(1)
    one, two = rng.standard_normal((4, 5), np.float32), rng.standard_normal((4, 5), np.float32)
    by_name: dict[str, Callable[[Any, Any], Any]] = {
        "cosine": lambda a, b: a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), "dot": lambda a, b: a @ b,
        "euclidean": lambda a, b: -np.linalg.norm(a - b), "manhattan": lambda a, b: -np.abs(a - b).sum(),
    }  # fmt: skip
    for name, rule in by_name.items():
        for first in (one, one[:1]):
            wanted = [rule(first[i if len(first) > 1 else 0], two[i]) for i in range(4)]
            np.testing.assert_allclose(similarities(first, two, name), wanted, rtol=1e-5, atol=1e-6)
    queries, documents = [one[:2], one[1:]], [two[:1], two[1:3]]
    wanted = [sum(max(float(q @ d) for d in document) for q in query) for query, document in zip(queries, documents)]
    np.testing.assert_allclose(max_sim(queries, documents), wanted, rtol=1e-5)
    alone = [sum(max(float(q @ d) for d in document) for q in one[:2]) for document in documents]
    np.testing.assert_allclose(max_sim([one[:2]], documents), alone, rtol=1e-5)
