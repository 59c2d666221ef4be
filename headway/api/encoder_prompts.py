"""Prompts of models with an encoder and a decoder: what each of the two is given.

    "text", token ids                          the encoder's, of models that read; the decoder begins as the model's files say
    {"encoder_prompt": ..., "decoder_prompt": ...}   both; the decoder's may be left out, or None
    {"prompt": ..., "multi_modal_data": {"audio": (samples, rate)}}   of models that hear: the prompt is the decoder's

An encoder's prompt is text, token ids, or a dictionary with "prompt" or "prompt_token_ids", or with "multi_modal_data".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.api.long_texts import encode_bounded
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError, UnknownParameterError
from headway.core.hearing import HearingInfo
from headway.core.messages import ModelInfo
from headway.multimodal.audio.decode import check_samples
from headway.multimodal.audio.errors import AudioError
from headway.multimodal.audio.mel import log_mel
from headway.multimodal.audio.wav import Floats

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

BOTH = ("encoder_prompt", "decoder_prompt", "cache_salt")
ONE = ("prompt", "prompt_token_ids", "multi_modal_data", "cache_salt")
MEDIA = "multi_modal_data"


def split_prompt(
    prompt: object, info: ModelInfo, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], list[EncoderItem]]:
    """The decoder's prompt, as token ids with the salt that came, and what the encoder is given.

    Raises:
        InvalidRequestError: a part is missing, or is not what the model reads.
    """
    salt, decoder = None, None
    if isinstance(prompt, Mapping):
        known = BOTH if "encoder_prompt" in prompt or "decoder_prompt" in prompt else ONE
        for key in prompt:
            if key not in known:
                raise UnknownParameterError(str(key), known, "a prompt")
        salt = prompt.get("cache_salt")
        if known is BOTH:
            encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
        elif info.encoder == "audio":
            encoder = {MEDIA: prompt[MEDIA]} if MEDIA in prompt else None
            decoder = {key: prompt[key] for key in ("prompt", "prompt_token_ids") if prompt.get(key)} or None
        else:
            encoder = {key: prompt[key] for key in prompt if key != "cache_salt"}
    else:
        encoder = prompt
    item = _hear(encoder, info) if info.encoder == "audio" else _read(encoder, info, tokenizer)
    found: dict[str, Any] = {"prompt_token_ids": _decoder_ids(decoder, info, tokenizer)}
    return (found if salt is None else {**found, "cache_salt": salt}), [item]


def audio_item(samples: Floats, hearing: HearingInfo) -> EncoderItem:
    """One window of a recording, float32 [n] at 16 kHz, for the encoder; what is behind the window is not heard."""
    data = log_mel(samples, bins=hearing.mel_bins, frames=hearing.frames).tobytes()
    return _item("audio", hearing.outputs, (hearing.mel_bins, hearing.frames), data)


def _item(kind: str, rows: int, sizes: tuple[int, ...], data: bytes) -> EncoderItem:
    key = blake2b(data, digest_size=16, person=kind.encode()).digest()
    return EncoderItem(kind=kind, key=key, rows=rows, sizes=sizes, data=data)


def _hear(prompt: object, info: ModelInfo) -> EncoderItem:
    media = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    if isinstance(prompt, Mapping) and prompt.get("prompt"):
        raise InvalidRequestError("this model's encoder hears and does not read; its prompt must be empty", "prompt")
    if not isinstance(media, Mapping) or set(media) != {"audio"} or info.hearing is None:
        raise InvalidRequestError(
            'this model hears: a prompt needs "multi_modal_data": {"audio": (samples, rate)} and nothing else there',
            MEDIA,
        )
    given = media["audio"]
    if isinstance(given, list) and len(given) == 1:
        [given] = given
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidRequestError('"audio" must be one (samples, rate)', MEDIA)
    try:
        samples = check_samples(*given, most_seconds=info.hearing.window_seconds)
    except AudioError as error:
        raise InvalidRequestError(f"{error}; transcribe() takes longer ones", MEDIA) from None
    return audio_item(samples, info.hearing)


def _read(prompt: object, info: ModelInfo, tokenizer: Tokenizer | None) -> EncoderItem:
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in ("prompt", "prompt_token_ids"):
                raise UnknownParameterError(str(key), ("prompt", "prompt_token_ids"), "an encoder's prompt")
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    ids = _ids(prompt, info, tokenizer, info.max_encoder_tokens, special=True, name="encoder_prompt")
    return _item("text", len(ids), (), np.array(ids, np.int32).tobytes())


def _decoder_ids(prompt: object, info: ModelInfo, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    start = info.decoder_start
    if prompt is None or prompt == "":
        if not start:
            raise InvalidRequestError("the model's files name no token to begin with; give a decoder prompt", "prompt")
        return list(start)
    ids = _ids(prompt, info, tokenizer, info.max_model_len - 1, special=False, name="decoder_prompt")
    return ids if isinstance(prompt, list | tuple) or not start or ids[0] == start[0] else [start[0], *ids]


def _ids(
    prompt: object, info: ModelInfo, tokenizer: Tokenizer | None, most: int, *, special: bool, name: str
) -> list[int]:
    """Token ids of text, or those that are given, checked."""
    if isinstance(prompt, str) and prompt:
        if tokenizer is None:
            raise InvalidRequestError("skip_tokenizer_init is set: prompts must be token ids, not text", name)
        prompt = encode_bounded(tokenizer, prompt, most, {"add_special_tokens": special})
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        raise InvalidRequestError(f"{name} must be text or token ids, and not empty", name)
    if len(prompt) > most:
        raise InvalidRequestError(f"{name} has {len(prompt)} tokens; at most {most} are possible", name)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < info.vocab_size:
            raise InvalidRequestError(f"{name}: {token!r:.40} is not a token id (0 to {info.vocab_size - 1})", name)
    return list(prompt)
