"""What the door makes of texts for models that pool, option by option of what the model's files say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.api.pooling.door import PoolingDoor
from headway.core.config import EngineArgs
from headway.core.params import PoolingParams
from headway.core.task import Task
from tests.api.pooling_core import CLS, EMBED, MAX_LEN, SEP, WORDS, PoolingCore, word_tokenizer

LAST = WORDS.index("w50")


def door(eos: int | None = LAST, **pooling: Any) -> PoolingDoor:
    info = PoolingCore(EngineArgs(model="embed")).info
    info.pooling = msgspec.structs.replace(EMBED, **pooling)
    tokenizer = word_tokenizer()
    tokenizer.eos_token_id = eos
    return PoolingDoor(info, tokenizer)


def made(at: PoolingDoor, text: object, **params: Any) -> list[int]:
    return at.token_ids([text], at.wanted(PoolingParams(**params), Task.EMBED))[0]


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_end_with_the_last_token_where_the_model_wants_it(side: str) -> None:
    """Once, behind what the tokenizer adds, and also where a text is cut; ids that come as ids stay as they are."""
    wants, plain = door(append_eos=True), door(append_eos=False)
    text, body = "w1 w2 w3", ids("w1 w2 w3")
    assert made(plain, text) == [CLS, *body, SEP]
    assert made(wants, text) == [CLS, *body, SEP, LAST]
    assert made(door(SEP, append_eos=True), text) == [CLS, *body, SEP]
    assert made(door(None, append_eos=True), text) == [CLS, *body, SEP]
    assert made(wants, [5, 6, 7]) == [5, 6, 7]
    kept = body[:2] if side == "right" else body[1:]
    cut = {"truncation_side": side}
    assert made(wants, text, truncate_prompt_tokens=5, **cut) == [CLS, *kept, SEP, LAST]
    assert made(wants, text, truncate_prompt_tokens=6, **cut) == [CLS, *body, SEP, LAST]
    assert made(plain, text, truncate_prompt_tokens=4, **cut) == [CLS, *kept, SEP]


def test_which_end_goes_is_the_models_unless_the_request_says() -> None:
    body = ids("w1 w2 w3")
    for usual in ("right", "left"):
        at = door(truncation_side=usual)
        for asked in (None, "right", "left"):
            kept = body[:1] if (asked or usual) == "right" else body[2:]
            assert made(at, "w1 w2 w3", truncate_prompt_tokens=3, truncation_side=asked) == [CLS, *kept, SEP]


def test_what_stands_in_front_of_a_text() -> None:
    """The default prompt, the one that is named, or none; and lower case, of both."""
    prompts = {"query": "w7 ", "passage": "w8 "}
    assert made(door(prompts=prompts), "w1") == [CLS, *ids("w1"), SEP]
    at = door(prompts=prompts, default_prompt_name="query")
    assert made(at, "w1") == [CLS, *ids("w7 w1"), SEP]
    assert made(at, "w1", prompt_name="passage") == [CLS, *ids("w8 w1"), SEP]
    lower = door(prompts={"query": "W7 "}, lower_case=True, default_prompt_name="query")
    assert made(lower, "W1") == [CLS, *ids("w7 w1"), SEP]
    assert lower.cased("Aa") == "aa" and at.cased("Aa") == "Aa"


def test_texts_are_cut_to_what_the_model_was_trained_for() -> None:
    at, long = door(max_length=10), " ".join(["w1"] * 40)
    assert len(made(at, long, truncate_prompt_tokens=-1)) == 10
    assert len(made(at, long, truncate_prompt_tokens=7)) == 7
    assert len(made(door(max_length=MAX_LEN), " ".join(["w1"] * 80), truncate_prompt_tokens=-1)) == MAX_LEN
