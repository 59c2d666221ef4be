"""Incremental detokenisation: token ids in, text out, nothing emitted that a later token could change.

For every stream, the concatenation of all ``step`` results and ``flush`` equals ``decode(prompt tail + completion)``
without the text of the prompt tail. Two kinds:

- ``ByteLevelStream`` for byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM): every token is a fixed string of bytes,
  so a UTF-8 decoder that keeps unfinished characters is all it takes. Constant work per token.
- ``WindowStream`` for every other decoder (sentencepiece with byte fallback, Metaspace, WordPiece): decodes a short
  window of ids and emits what the new ones added.

``tokenizers.decoders.DecodeStream`` does neither: it emits prompt text when the prompt ends in an unfinished character,
has no flush, and re-decodes its window on every token.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

REPLACEMENT: Final = "\ufffd"
MAX_HELD: Final = 32
"""Ids a WindowStream keeps while their text ends in a replacement character, before it believes the character."""

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """One completion's text, token by token. Not shared between requests."""

    def step(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "" in the middle of a character."""
        ...

    def flush(self) -> str:
        """What is left at the end: unfinished characters as U+FFFD. The stream is used up then."""
        ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: character -> byte.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


def decoder_parts(decoder: Any) -> list[str]:
    """The types in a ``tokenizers`` decoder, in order; [] for none."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state["decoders"]] if state["type"] == "Sequence" else [state["type"]]


def byte_of(token: str) -> int | None:
    """The byte a byte-fallback token such as "<0xE2>" stands for."""
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


class ByteLevelStream:
    """Text of a byte-level tokenizer.

    Args:
        token_bytes: id -> its bytes; b"" for ids that decoding skips.
        tail: the last ids of the prompt; bytes of an unfinished character there are completed by the completion.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], tail: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in tail:
            self._decoder.decode(token_bytes(token_id))

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Text of any decoder whose output grows with its input.

    Args:
        decode: ids -> text; must not be handed ids that ``skips``.
        skips: True for ids that decoding leaves out (special tokens, unknown ids).
        byte: the byte a byte-fallback token stands for, None for other tokens. The text of such tokens is held until
            another token follows: the decoder turns a whole run into U+FFFD when any part of it is not UTF-8.
        tail: the last ids of the prompt: context, not text.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skips: Callable[[int], bool],
        byte: Callable[[int], int | None],
        tail: Sequence[int],
    ) -> None:
        self._decode, self._skips, self._byte = decode, skips, byte
        self._context = _from_whole_character([i for i in tail if not skips(i)], byte)
        # Bytes of an unfinished character are not the prompt's text yet; with them the run would be no UTF-8.
        done = len(self._context) - _unfinished(self._context, byte)
        self._base = decode(self._context[:done]) if done else ""
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        if self._skips(token_id):
            return ""
        self._held.append(token_id)
        if self._byte(token_id) is not None:
            return ""
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._held)) if self._held else ""

    def _emit(self, text: str) -> str:
        start = _common_prefix(self._base, text)
        new = text[start:]
        if new:
            # These ids are the next context. Only when they showed: a decoder that treats the start of a text
            # differently (sentencepiece drops its first space) must keep seeing that this is not the start.
            self._context, self._held = self._held, []
            self._base = self._decode(self._context)
        return new


def _from_whole_character(ids: list[int], byte: Callable[[int], int | None]) -> list[int]:
    """``ids`` without the bytes at their start that continue a character cut off before."""
    start = next((n for n, i in enumerate(ids) if (b := byte(i)) is None or b & 0xC0 != 0x80), len(ids))
    return ids[start:]


def _unfinished(ids: list[int], byte: Callable[[int], int | None]) -> int:
    """How many ids at the end are the beginning of a UTF-8 character that is not whole."""
    for count in range(1, min(len(ids), 3) + 1):
        value = byte(ids[-count])
        if value is None or value < 0x80:
            return 0
        if value >= 0xC0:
            needed = 2 + (value >= 0xE0) + (value >= 0xF0)
            return count if count < needed else 0
    return 0


def _common_prefix(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
