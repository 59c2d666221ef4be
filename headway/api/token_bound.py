"""How much text one token can stand for, where a tokenizer has such a bound.

Then a text of B bytes has at least B / bound tokens, and a prompt that is far too long need not be tokenised to know it. There
is no bound where text may vanish or many characters become one token: normalizers that strip, pre-tokenizers that drop
blanks, unknown pieces that are fused or skipped. Added tokens that take the blanks beside them along are named, so that
blanks count for nothing in a text that holds one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import models

from headway.api.text_stream import byte_alphabet

UNICODE_FACTOR: Final = 4
"""Bytes of text that a byte of its normal form or lower case may come from: four of a mathematical letter become one."""
CHAR_BYTES: Final = 4
"""Of a character's UTF-8: what an unknown token may stand for."""
LOSSLESS_PRE: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
NEVER: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
"""Bytes that UTF-8 never has."""
CUTTING_PRE: Final = frozenset({"Split", "Punctuation"})
"""These keep all text unless their behaviour is to remove what they find."""


def blank_eaters(backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    """What added tokens that take blanks along are spelled like; "", which is everywhere, where that cannot be told."""
    eaters = [t for t in backend.get_added_tokens_decoder().values() if t.lstrip or t.rstrip]
    if backend.normalizer is not None and any(token.normalized for token in eaters):
        return ("",)
    return tuple(token.content for token in eaters)


class TokenBound(NamedTuple):
    """How many tokens a text has at least.

    Attributes:
        longest: the most bytes of a text, in UTF-8, that one token stands for.
        vanishing: bytes that no token stands for: the library skips them.
    """

    longest: int
    vanishing: bytes

    def size(self, text: str) -> int:
        """Bytes of ``text`` that tokens have to stand for."""
        if text.isascii() and not self.vanishing:
            return len(text)
        return len(text.encode("utf-8", "surrogatepass").translate(None, self.vanishing))

    def least(self, text: str) -> int:
        """Tokens that ``text`` has at least."""
        return -(-self.size(text) // self.longest)


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    """The bound of a tokenizer; None where it has none.

    Blanks beside one of the ``blank_eaters`` are left out of account.
    """
    normalizers = _parts(backend.normalizer, "normalizers")
    cuts = _parts(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    factor = 1.0
    for part in normalizers:
        shrinks = _shrinks(part)
        if shrinks is None:
            return None
        factor *= shrinks
    if not all(_keeps_all(part) for part in cuts):
        return None
    is_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *cuts))
    longest = _longest_piece(backend, is_bytes)
    if longest is None:
        return None
    vanishing = _vanishing(backend) if is_bytes else b""
    if factor > 1 and set(vanishing) - NEVER:
        return None
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return TokenBound(int(longest * factor) + 1 if factor > 1 else longest, vanishing)


def _parts(part: Any, name: str) -> list[dict[str, Any]]:
    """Settings of a normalizer or pre-tokenizer, sequences opened."""
    if part is None:
        return []
    return list(_opened(json.loads(part.__getstate__()), name))


def _opened(settings: dict[str, Any], name: str) -> Iterable[dict[str, Any]]:
    if settings.get("type") != "Sequence":
        yield settings
        return
    for each in settings[name]:
        yield from _opened(each, name)


def _shrinks(part: dict[str, Any]) -> float | None:
    """By what factor a normalizer may make a text shorter; None: without bound."""
    kind = part.get("type")
    if kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        return UNICODE_FACTOR
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "Replace" and isinstance(part["pattern"].get("String"), str) and part["content"]:
        return max(1.0, len(part["pattern"]["String"].encode()) / len(part["content"].encode()))
    return None


def _keeps_all(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return kind in LOSSLESS_PRE or (kind in CUTTING_PRE and part.get("behavior") != "Removed")


def _longest_piece(backend: tokenizers.Tokenizer, is_bytes: bool) -> int | None:
    """Bytes of the longest token of a model that gives at least one token for every piece of text."""
    model = backend.model
    if isinstance(model, models.BPE):
        vocab = backend.get_vocab(with_added_tokens=False)
        if is_bytes:
            return max(map(len, vocab))  # a letter of this alphabet is a byte
        whole = (model.byte_fallback and _has_bytes(vocab)) or (model.unk_token in vocab and not model.fuse_unk)
    elif isinstance(model, models.Unigram):
        settings = json.loads(model.__getstate__())
        vocab = {piece: 0 for piece, _ in settings["vocab"]}
        whole = not is_bytes and bool(settings.get("byte_fallback")) and _has_bytes(vocab)
    else:
        return None
    return max(CHAR_BYTES, *(len(piece.encode()) for piece in vocab)) if whole else None


def _vanishing(backend: tokenizers.Tokenizer) -> bytes:
    """Bytes that a byte-level vocabulary has no token for, such as control characters nobody had in the training text."""
    vocab = backend.get_vocab(with_added_tokens=False)
    return bytes(byte for letter, byte in byte_alphabet().items() if letter not in vocab)


def _has_bytes(vocab: Iterable[str]) -> bool:
    return {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocab)
