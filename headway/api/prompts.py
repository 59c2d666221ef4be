"""What prompts look like, in the forms and by the names of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from headway.core.errors import InvalidRequestError


class TextPrompt(TypedDict, total=False):
    """``{"prompt": text}``, optionally with a ``cache_salt``: only equal salts share cached prefixes; and with
    ``parse_special``: by default control tokens that the text spells become such, with False they stay text. Models with
    sight take ``multi_modal_data``, ``{"image": picture or list of them}``, and text with a placeholder for each; those that
    hear ``{"audio": (samples, rate), a file's bytes, or a list of them}``, too.
    """

    prompt: str
    cache_salt: str
    parse_special: bool
    multi_modal_data: dict[str, Any]


class TokensPrompt(TypedDict, total=False):
    """``{"prompt_token_ids": ids}``, optionally with a ``cache_salt``."""

    prompt_token_ids: list[int]
    cache_salt: str
    multi_modal_data: dict[str, Any]


class EncoderDecoderPrompt(TypedDict, total=False):
    """``{"encoder_prompt": ..., "decoder_prompt": ...}`` for models with an encoder and a decoder, see ``encoder_prompts``; or,
    of those that hear, ``{"prompt": ..., "multi_modal_data": {"audio": (samples, rate)}}``."""

    encoder_prompt: Any
    decoder_prompt: Any
    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: dict[str, Any]
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt | EncoderDecoderPrompt


def is_token_ids(value: object) -> bool:
    """Whether ``value`` is a non-empty list or tuple of integers: one tokenised prompt."""
    return isinstance(value, (list, tuple)) and bool(value) and all(is_int(item) for item in value)


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """What ``LLM.generate`` takes, as a list of prompts. A flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, (list, tuple)):
        return list(prompts)
    raise InvalidRequestError(
        f"a prompt must be a string, a list of token ids or a dictionary, got {type(prompts).__name__}", "prompt"
    )


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
