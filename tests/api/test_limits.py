"""Both sides of every limit a request may meet at the door: the last value that is taken, the first that is refused."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from headway.api.inputs import Door, check_logprobs
from headway.core.errors import InvalidRequestError
from headway.core.ints import mix64
from headway.core.params import SamplingParams
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import VOCAB, model_info

TAKEN_AND_REFUSED: list[tuple[str, Any, Any]] = [
    ("n", 1, 0), ("n", 256, 257), ("temperature", 0.0, -0.01), ("temperature", 100.0, 100.1), ("top_k", -1, -2),
    ("top_k", 2**31 - 1, 2**31), ("top_p", 1.0, 1.001), ("top_p", 1e-9, 0.0), ("min_p", 0.0, -0.001), ("min_p", 1.0, 1.001),
    ("presence_penalty", -2.0, -2.01), ("presence_penalty", 2.0, 2.01), ("frequency_penalty", -2.0, -2.01),
    ("frequency_penalty", 2.0, 2.01), ("repetition_penalty", 1e-6, 0.0), ("repetition_penalty", 100.0, 100.1),
    ("logit_bias", {1: 100.0}, {1: 100.1}), ("logit_bias", {1: -100.0}, {1: -100.1}),
    ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
    ("seed", 2**63 - 1, 2**63), ("seed", -(2**63), -(2**63) - 1), ("logprobs", 0, -1), ("prompt_logprobs", 0, -1),
    ("max_tokens", 1, 0), ("min_tokens", 0, -1), ("min_tokens", 16, 17),  # max_tokens is 16
    ("stop", ["x"] * 64, ["x"] * 65), ("stop", ["x" * 1024], ["x" * 1025]), ("bad_words", ["x"] * 256, ["x"] * 257),
    ("stop_token_ids", list(range(64)), list(range(65))), ("logprob_token_ids", list(range(128)), list(range(129))),
    ("logprob_token_ids", [0], []), ("allowed_token_ids", [0], []), ("stop_token_ids", [0], [-1]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "taken", "refused"), TAKEN_AND_REFUSED, ids=lambda value: str(value)[:20])
def test_parameters(field: str, taken: Any, refused: Any) -> None:
    SamplingParams(**{field: taken})
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: refused})
    assert caught.value.parameter == field


IN_THE_MODEL: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"logprobs": 5}, {"logprobs": 6}, "logprobs"),
    ({"prompt_logprobs": 5}, {"prompt_logprobs": 6}, "prompt_logprobs"),
    ({"allowed_token_ids": [VOCAB - 1]}, {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"logprob_token_ids": [VOCAB - 1]}, {"logprob_token_ids": [VOCAB]}, "logprob_token_ids"),
    ({"stop_token_ids": [VOCAB - 1]}, {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"logit_bias": {VOCAB - 1: 1.0}}, {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ({"min_tokens": 6, "max_tokens": 50}, {"min_tokens": 7, "max_tokens": 50}, "min_tokens"),
]


@pytest.mark.parametrize(("taken", "refused", "field"), IN_THE_MODEL, ids=lambda value: str(value)[:30])
def test_what_the_model_allows(taken: dict[str, Any], refused: dict[str, Any], field: str) -> None:
    """Ten tokens of context, four of prompt, at most 5 log-probabilities."""
    door = Door(model_info(10), None)
    door.prepare([1, 2, 3, 4], SamplingParams(detokenize=False, **taken))
    with pytest.raises(InvalidRequestError) as caught:
        door.prepare([1, 2, 3, 4], SamplingParams(detokenize=False, **refused))
    assert caught.value.parameter == field


def test_a_prompt_leaves_room_for_one_token() -> None:
    door = Door(model_info(10), None)
    prepared = door.prepare([1] * 9, SamplingParams(detokenize=False, max_tokens=99))
    assert prepared.params.max_tokens == 1
    with pytest.raises(InvalidRequestError, match="at most 9 fit"):
        door.prepare([1] * 10, SamplingParams(detokenize=False))
    for token, is_good in ((VOCAB - 1, True), (VOCAB, False), (0, True), (-1, False)):
        try:
            door.prepare([token], SamplingParams(detokenize=False))
        except InvalidRequestError:
            assert not is_good
        else:
            assert is_good


def test_one_completion_reports_on_the_prompt_for_all() -> None:
    prepared = Door(model_info(), None).prepare([5], SamplingParams(n=3, detokenize=False, prompt_logprobs=2))
    assert [child.params.prompt_logprobs for child in prepared.children] == [2, None, None]


@pytest.mark.parametrize(("seed", "n"), [(7, 3), (-1, 2), (2**63 - 1, 2), (-(2**63), 2)])
def test_seeds_of_completions(seed: int, n: int) -> None:
    prepared = Door(model_info(), None).prepare([5], SamplingParams(n=n, seed=seed, detokenize=False))
    assert [child.seed for child in prepared.children] == [(seed + i) % 2**64 for i in range(n)]


def test_bad_words_come_to_no_more_than_the_tables_hold() -> None:
    door = Door(model_info(), ByteTokenizer())  # type: ignore[arg-type]  # bytes: a word of n letters is n tokens, once
    door.prepare("a", SamplingParams(bad_words=["x" * 1024, "y" * 1024]))
    with pytest.raises(InvalidRequestError, match="bad_words come to"):
        door.prepare("a", SamplingParams(bad_words=["x" * 1024, "y" * 1024, "z"]))


@pytest.mark.parametrize("most", [1, 400])
def test_log_probabilities_that_are_kept_until_the_end(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted out: every token of every completion brings the chosen one and those asked for; likewise every prompt's token."""
    monkeypatch.setattr("headway.api.inputs.MAX_LOGPROBS_OF_A_REQUEST", most)
    cases: list[tuple[dict[str, Any], int, int, list[int], int, str]] = [
        ({"logprobs": 3}, 10, 2, [], 2 * 10 * 4, "logprobs"),
        ({"logprobs": 0}, 10, 5, [], 5 * 10, "logprobs"),
        ({"logprob_token_ids": [1, 2], "logprobs": 9}, 10, 2, [], 2 * 10 * 3, "logprobs"),
        ({"logprobs": 3}, 10, 1, [], 0, ""),  # one completion streams what it has
        ({}, 10, 5, [4, 4], 0, ""),
        ({"prompt_logprobs": 4, "logprobs": 1}, 1, 1, [10, 20, 30], 60 * 5, "prompt_logprobs"),
        ({"prompt_logprobs": 4}, 10, 5, [60], 0, ""),
        ({"prompt_logprobs": 0}, 10, 2, [100, 301], 401, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, 10, 2, [100, 300], 400, "prompt_logprobs"),
    ]
    for params, tokens, count, prompts, kept, field in cases:
        if kept <= most:
            check_logprobs(SamplingParams(**params), tokens, count, prompts)
        else:
            with pytest.raises(InvalidRequestError, match=f"{kept} log-probabilities") as caught:
                check_logprobs(SamplingParams(**params), tokens, count, prompts)
            assert caught.value.parameter == field


def test_seeds_of_requests_that_bring_none() -> None:
    """By the door's own seed, 0 unless it is given another, and the request's number."""
    for given, seed in (((), 0), ((0,), 0), ((5,), 5)):
        door = Door(model_info(), None, *given)
        found = [door.prepare([1], SamplingParams(detokenize=False)).children[0].seed for _ in range(3)]
        assert found == [mix64(seed, number) for number in range(3)]


def test_bad_words_beyond_what_the_tables_hold_are_not_tokenised() -> None:
    """256 of them, of 1,024 characters each, would hold up the event loop for a third of a second."""

    class Watched(ByteTokenizer):
        read = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.read += len(text)
            return super().encode(text, add_special_tokens)

    tokenizer = Watched()
    door = Door(model_info(), tokenizer)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="bad_words come to"):
        door.prepare([1], SamplingParams(bad_words=["x" * 1024] * 256))
    assert tokenizer.read < 8 * 1024


@pytest.mark.parametrize(
    "bias",
    [{"1_0": 1}, {" 5": 1}, {"٣": 1}, {"05": 1}, {"+5": 1}, {5.0: 1}, {5.7: 1}, {True: 1}, {5: "1"}, {5: True}, {5: 10**400},
     {5: None}],
)  # fmt: skip
def test_what_is_no_plain_id_or_number_is_no_bias(bias: Any) -> None:
    """Rounded or read leniently, a bias would fall on another token than was meant."""
    with pytest.raises(InvalidRequestError, match="integer token ids to numbers") as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.parameter == "logit_bias"


def test_ids_and_numbers_of_numpy_are_a_bias() -> None:
    assert SamplingParams(logit_bias={np.int64(5): np.float32(0.5), "7": -1}).logit_bias == {5: 0.5, 7: -1.0}  # type: ignore[dict-item]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_integers_beyond_any_float_are_out_of_range(field: str) -> None:
    for value in (10**400, -(10**400), float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**cast(Any, {field: value}))
        assert caught.value.parameter == field
