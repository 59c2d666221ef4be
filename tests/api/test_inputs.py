"""The door refuses what cannot be served, and says which field."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headway.api.inputs import Door, default_params, params_list
from headway.api.long_texts import MIN_WINDOW
from headway.api.prompts import prompt_list
from headway.core.errors import InvalidRequestError, UnknownParameterError
from headway.core.ints import mix64
from headway.core.params import SamplingParams
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import EOS, VOCAB, model_info


def door(tokenizer: bool = True, max_model_len: int = 32, seed: int = 0) -> Door:
    return Door(model_info(max_model_len), cast(Any, ByteTokenizer()) if tokenizer else None, seed)


@pytest.mark.parametrize(
    ("prompt", "text", "ids", "salt"),
    [
        ("ab", "ab", [1, 97, 98], None),
        ([5, 6], None, [5, 6], None),
        ((5, 6), None, [5, 6], None),
        ({"prompt": "ab"}, "ab", [1, 97, 98], None),
        ({"prompt": "a", "cache_salt": "s"}, "a", [1, 97], "s"),
        ({"prompt_token_ids": [7], "cache_salt": "s"}, None, [7], "s"),
    ],
)
def test_every_form_of_prompt(prompt: Any, text: str | None, ids: list[int], salt: str | None) -> None:
    prepared = door().prepare(prompt, SamplingParams())
    assert (prepared.prompt, prepared.prompt_token_ids) == (text, ids)
    [child] = prepared.children
    assert child.prompt_token_ids == ids
    assert child.cache_salt == salt
    assert child.eos_token_ids == [EOS]


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ([VOCAB], "prompt"),
        ([-1], "prompt"),
        ([1.0], "prompt"),
        ([True], "prompt"),
        (7, "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ([1] * 32, "prompt"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door().prepare(prompt, SamplingParams())
    assert caught.value.parameter == parameter


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(UnknownParameterError, match="did you mean 'prompt'"):
        door().prepare(cast(Any, {"promt": "a"}), SamplingParams())


def test_a_long_prompt_is_told_its_length_and_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match=r"40 tokens, but at most 31 fit: max_model_len is 32"):
        door().prepare([1] * 40, SamplingParams())
    assert door().prepare([1] * 31, SamplingParams()).children[0].params.max_tokens == 1


def test_of_a_text_that_is_far_too_long_only_the_head_is_tokenised() -> None:
    class Watched(ByteTokenizer):
        longest = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.longest = max(self.longest, len(text))
            return super().encode(text.replace("_", ""), add_special_tokens)

    tokenizer = Watched()
    careful = Door(model_info(max_model_len=32), cast(Any, tokenizer), 0)
    with pytest.raises(
        InvalidRequestError, match=r"100000 characters .* at most 31 fit: max_model_len is 32"
    ) as caught:
        careful.prepare("x" * 100_000, SamplingParams())
    assert caught.value.parameter == "prompt" and tokenizer.longest <= MIN_WINDOW
    text = "_" * 100_000 + "x"  # many characters, few tokens
    assert careful.prepare(text, SamplingParams()).prompt_token_ids == [1, ord("x")]


@pytest.mark.parametrize(("asked", "given"), [(None, 22), (5, 5), (22, 22), (23, 22), (10**6, 22)])
def test_max_tokens_is_cut_to_the_room(asked: int | None, given: int) -> None:
    assert door().prepare([1] * 10, SamplingParams(max_tokens=asked)).children[0].params.max_tokens == given


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 6},
        {"prompt_logprobs": 6},
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"allowed_token_ids": [0, VOCAB]},
        {"stop_token_ids": [VOCAB]},
        {"logprob_token_ids": [VOCAB]},
        {"min_tokens": 30, "max_tokens": None},
        {"bad_words": ["x" * 1024, "y" * 1024, "z"]},
        {"bad_words": [" "]},
    ],
)
def test_parameters_that_the_model_cannot_serve(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door().prepare([1] * 10, SamplingParams(**params))
    assert caught.value.parameter == next(iter(params))


@pytest.mark.parametrize("params", [{"stop": ["a"]}, {"bad_words": ["a"]}])
def test_strings_need_a_tokenizer(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init") as caught:
        door(tokenizer=False).prepare([1], SamplingParams(**params))
    assert caught.value.parameter == next(iter(params))
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        door(tokenizer=False).prepare("text", SamplingParams())
    assert door(tokenizer=False).prepare([1], SamplingParams()).children


def test_params_must_be_sampling_params() -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        door().prepare("a", cast(Any, {"n": 1}))
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        params_list(cast(Any, 3), 1)


def test_fan_out() -> None:
    params = SamplingParams(n=3, seed=5, prompt_logprobs=1, stop=["x"], ignore_eos=True)
    prepared = door().prepare([1, 2], params)
    assert [child.seed for child in prepared.children] == [5, 6, 7]
    assert len({child.request_id for child in prepared.children}) == 3
    assert [child.params.prompt_logprobs for child in prepared.children] == [1, None, None]
    assert all(child.params.n == 1 and child.eos_token_ids == [] for child in prepared.children)
    assert params.n == 3


def test_seeds_stay_within_64_bits() -> None:
    seeds = [child.seed for child in door().prepare([1], SamplingParams(n=3, seed=-2)).children]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]


def test_missing_seeds_are_fresh_and_repeat_from_run_to_run() -> None:
    def seeds(seed: int) -> list[int]:
        at = door(seed=seed)
        return [at.prepare([1], SamplingParams()).children[0].seed for _ in range(50)]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0) + seeds(1))) == 100
    assert mix64(-1, 0) == mix64(2**64 - 1, 0)


def test_request_ids_are_never_used_twice() -> None:
    at = door()
    ids = [child.request_id for _ in range(20) for child in at.prepare([1], SamplingParams(n=2)).children]
    assert len(set(ids)) == 40


def test_bad_words_with_and_without_a_space() -> None:
    class WordTokenizer(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return {"ab": [3], " ab": [4], "c": [5], " c": [9, 5]}[text]

    at = Door(model_info(), cast(Any, WordTokenizer()))
    assert at.prepare([1], SamplingParams(bad_words=["ab", " c"])).children[0].bad_words_token_ids == [[3], [4], [5]]


def test_lists_of_prompts_and_params() -> None:
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list(cast(Any, ["a", [1]])) == ["a", [1]]
    assert prompt_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert prompt_list([]) == []
    with pytest.raises(InvalidRequestError):
        prompt_list(cast(Any, 5))
    one = SamplingParams()
    assert params_list(one, 2) == [one, one]
    with pytest.raises(InvalidRequestError, match="3 prompts came with 2"):
        params_list([one, one], 3)


def test_generation_config_gives_the_defaults() -> None:
    params = default_params(model_info())
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 16)
    assert isinstance(params.top_k, int)


def test_params_changed_between_requests_are_seen() -> None:
    """Equal parameters are copied once for many requests; what is changed in place is checked and used anew."""
    at, params = door(), SamplingParams(max_tokens=3, stop=["x"])
    before = at.prepare([1, 2], params)
    assert at.prepare([1], params).params is before.params
    params.max_tokens = 5
    assert at.prepare([1], params).children[0].params.max_tokens == 5
    assert before.params.max_tokens == 3
    assert isinstance(params.stop, list)
    params.stop.append("y")
    assert at.prepare([1], params).params.stop == ["x", "y"]
    params.top_p = 7.0
    with pytest.raises(InvalidRequestError, match="top_p"):
        at.prepare([1], params)
    allowed = SamplingParams(allowed_token_ids=[1])
    assert at.prepare([1], allowed).params is not at.prepare([1], allowed).params


def test_a_longer_prompt_leaves_less_room_for_equal_params() -> None:
    at, params = door(max_model_len=8), SamplingParams(max_tokens=None)
    rooms = [at.prepare([1] * length, params).params.max_tokens for length in (3, 3, 5, 3)]
    assert rooms == [5, 5, 3, 5]
