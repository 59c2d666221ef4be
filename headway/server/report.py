"""What all generating routes report: ids, usage, log-probabilities."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headway.core.outputs import Logprob, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

LOWEST: Final = -9999.0
"""What OpenAI shows for a token that cannot be chosen: JSON has no minus infinity."""


def new_id(prefix: str) -> str:
    """A name that cannot be guessed or chosen."""
    return prefix + os.urandom(16).hex()


class Usage:
    """Token counts of one request as they grow."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._prompts: dict[int, tuple[int, int]] = {}

    def take(self, number: int, output: RequestOutput) -> None:
        """Count a delta, or a whole output, of prompt ``number``."""
        self._prompts[number] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(cached for _, cached in self._prompts.values())

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def finite(logprob: float) -> float:
    """A number JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of a chat completion.

    ``token`` shows U+FFFD where a token is part of a character; ``bytes`` are exact.

    Args:
        top: how many alternatives to list; ids asked for by name are always listed.
    """

    def entry(token: int, value: Logprob) -> dict[str, Any]:
        text, raw = tokenizer.token_text(token), tokenizer.token_bytes(token)
        return {"token": text, "logprob": finite(value.logprob), "bytes": list(raw)}

    content = []
    for row in rows:
        (token, chosen), *_ = row.items()
        ranked = sorted((v.rank, t) for t, v in row.items() if v.rank is not None and v.rank <= top)
        listed = [t for _, t in ranked] + [t for t, v in row.items() if v.rank is None]
        content.append({**entry(token, chosen), "top_logprobs": [entry(t, row[t]) for t in listed]})
    return content


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or ``bytes:\\xe2\\x82`` for a part of a character, so that different tokens have different names."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """``choices[].logprobs`` of text completions: four lists, one entry per token.

    ``text_offset`` counts characters of the choice's own text; it is carried from chunk to chunk.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def body(self, ids: list[int], rows: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; a row of None is the first token of a prompt, which nothing precedes."""
        tokens, chosen, top, offsets = [], [], [], []
        for token, row in zip(ids, rows, strict=True):
            tokens.append(token_name(self._tokenizer, token))
            chosen.append(None if row is None else finite(row[token].logprob))
            top.append(
                None if row is None else {token_name(self._tokenizer, t): finite(v.logprob) for t, v in row.items()}
            )
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(token))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def prompt_logprobs(rows: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's field: per prompt token, id -> logprob, rank, text."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token): {"logprob": finite(v.logprob), "rank": v.rank, "decoded_token": v.decoded_token}
            for token, v in row.items()
        }
        for row in rows
    ]
