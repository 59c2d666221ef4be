"""What encoder and decoder are given, for every form of a prompt; and both sides of every limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.api.encoder_prompts import audio_item, split_prompt
from headway.core.errors import InvalidRequestError, UnknownParameterError
from headway.core.hearing import HearingInfo
from headway.core.messages import ModelInfo
from headway.multimodal.audio.mel import log_mel
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import VOCAB, model_info

START = [7, 8]


def reader(start: list[int] | None = None, most: int = 6) -> ModelInfo:
    info = model_info(5)
    info.encoder, info.max_encoder_tokens, info.decoder_start = "text", most, START if start is None else start
    return info


def tokenizer() -> Any:
    return ByteTokenizer()


def split(prompt: object, info: ModelInfo) -> tuple[list[int], list[int], object]:
    """The decoder's ids, the encoder's, the salt."""
    found, [item] = split_prompt(prompt, info, tokenizer())
    assert set(found) <= {"prompt_token_ids", "cache_salt"} and item.rows == len(item.data) // 4 and not item.sizes
    return found["prompt_token_ids"], np.frombuffer(item.data, np.int32).tolist(), found.get("cache_salt")


@pytest.mark.parametrize(
    ("prompt", "decoder", "encoder"),
    [
        ("ab", START, [1, 97, 98]),
        ([5, 6], START, [5, 6]),
        ((5, 6), START, [5, 6]),
        ({"prompt": "ab"}, START, [1, 97, 98]),
        ({"prompt_token_ids": [5]}, START, [5]),
        ({"encoder_prompt": "ab"}, START, [1, 97, 98]),
        ({"encoder_prompt": "ab", "decoder_prompt": None}, START, [1, 97, 98]),
        ({"encoder_prompt": [4], "decoder_prompt": ""}, START, [4]),
        ({"encoder_prompt": {"prompt": "b"}, "decoder_prompt": "c"}, [7, 99], [1, 98]),
        ({"encoder_prompt": {"prompt_token_ids": [3]}, "decoder_prompt": {"prompt": "c"}}, [7, 99], [3]),
        ({"encoder_prompt": [3], "decoder_prompt": [9, 9]}, [9, 9], [3]),
        ({"encoder_prompt": [3], "decoder_prompt": {"prompt_token_ids": [9]}}, [9], [3]),
        ({"encoder_prompt": [3], "decoder_prompt": "\x07x"}, [7, 120], [3]),
    ],
)
def test_who_is_given_what(prompt: object, decoder: list[int], encoder: list[int]) -> None:
    """Ids in a list are taken as they are; text begins with the decoder's first token, once."""
    assert split(prompt, reader()) == (decoder, encoder, None)
    if isinstance(prompt, dict):
        assert split({**prompt, "cache_salt": "s"}, reader()) == (decoder, encoder, "s")


@pytest.mark.parametrize(
    ("taken", "refused", "says"),
    [
        ([1] * 6, [1] * 7, "encoder_prompt has 7 tokens; at most 6"),
        (
            {"encoder_prompt": [1], "decoder_prompt": [1] * 4},
            {"encoder_prompt": [1], "decoder_prompt": [1] * 5},
            "at most 4",
        ),
        ("abcde", "abcdef", "encoder_prompt has 7 tokens; at most 6"),
        ([VOCAB - 1], [VOCAB], "not a token id"),
        ([0], [-1], "not a token id"),
        ([1], [True], "not a token id"),
        ([1], ["a"], "not a token id"),
        ([1], [], "not empty"),
        ("a", "", "not empty"),
        ("a", b"a", "must be text or token ids"),
        ("a", 7, "must be text or token ids"),
        ("a", None, "must be text or token ids"),
        ("a", {"decoder_prompt": "a"}, "encoder_prompt must be"),
    ],
)
def test_limits(taken: object, refused: object, says: str) -> None:
    split(taken, reader())
    with pytest.raises(InvalidRequestError, match=says):
        split(refused, reader())


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "a", "encoder": "b"},
        {"encoder_prompt": "a", "prompt": "b"},
        {"encoder_prompt": {"prompt": "a", "salt": 1}},
    ],
)
def test_unknown_keys_are_named(prompt: dict[str, Any]) -> None:
    with pytest.raises(UnknownParameterError):
        split(prompt, reader())


def test_without_a_first_token_the_decoder_needs_a_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="give a decoder prompt"):
        split("ab", reader([]))
    assert split({"encoder_prompt": [3], "decoder_prompt": "c"}, reader([]))[0] == [99]


def test_without_a_tokenizer_ids_still_go() -> None:
    assert split_prompt([3], reader(), None)[0] == {"prompt_token_ids": START}
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        split_prompt("a", reader(), None)


HEARS = HearingInfo(mel_bins=8, frames=20, outputs=10, start=7, end=9)


def hearer() -> ModelInfo:
    info = reader()
    info.encoder, info.hearing = "audio", HEARS
    return info


def test_a_recording_is_the_encoders_and_the_text_the_decoders() -> None:
    samples = np.sin(np.arange(1600, dtype=np.float32))
    heard = {"audio": (samples, 16000)}
    item = audio_item(samples, HEARS)
    assert (item.rows, item.sizes) == (HEARS.outputs, (8, 20))
    assert item.data == log_mel(samples, bins=8, frames=20).tobytes()
    for prompt, ids in (
        ({"prompt": "c", "multi_modal_data": heard}, [7, 99]),
        ({"prompt_token_ids": [9], "multi_modal_data": heard}, [9]),
        ({"prompt": "", "multi_modal_data": {"audio": [(samples, 16000)]}}, START),
        ({"encoder_prompt": {"prompt": "", "multi_modal_data": heard}, "decoder_prompt": "c"}, [7, 99]),
    ):
        found, [one] = split_prompt(prompt, hearer(), tokenizer())
        assert found == {"prompt_token_ids": ids} and one.key == item.key and one.data == item.data
    other = audio_item(samples * np.float32(0.5), HEARS)
    assert other.key != item.key


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        {"prompt": "c"},
        {"prompt": "c", "multi_modal_data": {"image": 1}},
        {"prompt": "c", "multi_modal_data": {"audio": 1, "image": 1}},
        {"prompt": "c", "multi_modal_data": {"audio": np.zeros(5, np.float32)}},
        {"prompt": "c", "multi_modal_data": {"audio": []}},
        {"encoder_prompt": {"prompt": "c", "multi_modal_data": {"audio": (np.zeros(5, np.float32), 16000)}}},
    ],
    ids=str,
)
def test_what_cannot_be_heard(prompt: object) -> None:
    with pytest.raises(InvalidRequestError):
        split_prompt(prompt, hearer(), tokenizer())
