"""Tokenizers: text to ids and back, per model.

Wraps ``tokenizers.Tokenizer``. A folder with tokenizer.json and a GGUF file are read directly, in tens of milliseconds;
only folders with neither go through transformers, which takes seconds to import.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from headway.api.control_text import ControlTexts, MarkedText
from headway.api.gguf_tokenizer import build_tokenizer
from headway.api.text_stream import (
    ByteLevelStream,
    TextStream,
    WindowStream,
    byte_alphabet,
    byte_of,
    decoder_parts,
)
from headway.api.token_bound import TokenBound, blank_eaters, token_bound
from headway.core.errors import InvalidRequestError, ModelError
from headway.weights.gguf_file import GgufHeader, end_token_ids, read_header
from headway.weights.source import locate

LONG_CALL: Final = 4000
"""From so many characters or ids on the library is asked for a batch of one: only those calls let other threads run."""
TAIL: Final = 16
"""Ids of the prompt's end a stream needs as context: enough for any unfinished character and a word before it."""

UNASSIGNED: Final = "\U0010fffd"
"""A character that no vocabulary has."""
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"


class Tokenizer:
    """Text to token ids and back. Safe to share between threads.

    Args:
        backend: the tokenizer; truncation and padding are switched off.
        special_tokens: "bos_token" -> its text, and so on, as templates name them.
        chat_templates: Jinja sources by name; "default" is the usual one.
        eos_token_ids: ids that end generation, when the tokenizer's own files say (GGUF); else the eos token's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.added_ids: frozenset[int] = frozenset(added)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or own
        ends = {backend.id_to_token(i) for i in self.eos_token_ids} - {None}
        unknown = backend.encode(UNASSIGNED, add_special_tokens=False).ids
        self.control_ids = (self.special_ids | frozenset(self.eos_token_ids)) - frozenset(unknown)
        """Ids that a text may not spell its way to, where it is to stay text; an unknown character may give its own."""
        self.control_texts = ControlTexts(
            {token.content for token in added.values() if token.special} | {str(end) for end in ends},
            ignore_case=backend.normalizer is not None and "A" not in backend.normalizer.normalize_str("A"),
        )
        self._twins: dict[tuple[int, str], tokenizers.Tokenizer] = {}
        self._twins_lock = threading.Lock()
        parts = decoder_parts(backend.decoder)
        self._is_byte_level = parts == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in parts
        self._alphabet = byte_alphabet()
        self._bytes_of: dict[int, bytes] = {}
        self._anchored = lru_cache(maxsize=65536)(self._anchored_text)
        self._token_bound: list[TokenBound | None] = []
        self.blank_eaters = blank_eaters(backend)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written out in it are recognised, as in Hugging Face tokenizers, but for those
        that a MarkedText marks.

        Args:
            add_special_tokens: add what the model wants around a prompt, such as a beginning-of-sequence token.

        Raises:
            InvalidRequestError: the text is not valid Unicode (lone surrogates), or what is marked cannot stay text.
        """
        try:
            if isinstance(text, MarkedText):
                return self._encode_marked(text, add_special_tokens)
            if len(text) < LONG_CALL:
                found = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                [found] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"text is not valid Unicode: {error}") from error
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, as ``encode`` gives them; on all cores, while other threads of Python go on.

        Raises:
            InvalidRequestError: a text is not valid Unicode (lone surrogates).
        """
        if len(texts) == 1 and len(texts[0]) < LONG_CALL:
            return [self.encode(texts[0], add_special_tokens)]  # a batch wakes threads, a tenth of a millisecond
        try:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"text is not valid Unicode: {error}") from error
        return [each.ids for each in found]

    def _encode_marked(self, text: MarkedText, add_special_tokens: bool) -> list[int]:
        """Marks go in the twin's first normalising step, behind the search for special tokens. Where a special token is looked
        for after that, or the model has it among its pieces, marks are cut out before the model instead.
        """
        for twin in range(2):
            found = self._twin(twin, text.mark).encode(text.marked, add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
            spans = zip(ids, found.offsets)
            if not any(i in self.control_ids and text.mark in text.marked[a:b] for i, (a, b) in spans):
                return ids
        raise InvalidRequestError(
            "a control token that the text spells cannot be kept as text with this model's tokenizer; leave it out, or set "
            "parse_special: true"
        )

    def _twin(self, number: int, mark: str) -> tokenizers.Tokenizer:
        """A tokenizer without marks; built when it is first needed (half a second), as most servers never need one."""
        with self._twins_lock:
            if (number, mark) not in self._twins:
                twin = self._twins[number, mark] = tokenizers.Tokenizer.from_str(self.backend.to_str())
                if number == 0:
                    own, drop = twin.normalizer, normalizers.Replace(mark, "")
                    twin.normalizer = drop if own is None else normalizers.Sequence([drop, own])
                else:
                    before, cut = twin.pre_tokenizer, pre_tokenizers.Split(mark, "removed")
                    twin.pre_tokenizer = cut if before is None else pre_tokenizers.Sequence([cut, before])
            return self._twins[number, mark]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Unknown ids give nothing; bytes that are no UTF-8 give U+FFFD."""
        if len(ids) < LONG_CALL:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        [text] = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def new_stream(self, prompt_ids_tail: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """A stream for one completion.

        Args:
            prompt_ids_tail: the prompt's ids, or at least its last ``TAIL``; context that gives no text itself.
            skip_special_tokens: leave special tokens out of the text.
        """
        tail = prompt_ids_tail[-TAIL:]
        if self._is_byte_level:
            return ByteLevelStream(partial(self._stream_bytes, skip_special_tokens), tail)
        return WindowStream(
            partial(self.decode, skip_special_tokens=skip_special_tokens),
            partial(self._skips, skip_special_tokens),
            self._fallback_byte if self._has_byte_tokens else lambda _: None,
            tail,
        )

    def token_text(self, token_id: int) -> str:
        """What the token alone reads as, with its leading space; U+FFFD where it is part of a character."""
        if self._is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        return self._anchored(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for; b"" for an unknown id."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    @property
    def has_exact_bytes(self) -> bool:
        """Whether ``token_bytes`` is exact for every token; else parts of unknown characters come as U+FFFD."""
        return self._is_byte_level

    @property
    def token_bound(self) -> TokenBound | None:
        """How many tokens a text has at least; None where that cannot be told. Found out once, in .2 s."""
        if not self._token_bound:
            self._token_bound.append(token_bound(self.backend))
        return self._token_bound[0]

    def pick_template(self, has_tools: bool = False) -> str | None:
        """The chat template's source: for tools, the one made for them if there is one; None if the model has none."""
        if has_tools and TOOL_TEMPLATE in self.chat_templates:
            return self.chat_templates[TOOL_TEMPLATE]
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            if all(c in self._alphabet for c in token):
                return bytes(self._alphabet[c] for c in token)
            return token.encode()
        byte = byte_of(token) if self._has_byte_tokens else None
        return bytes([byte]) if byte is not None else self._anchored(token_id).encode()

    def _anchored_text(self, token_id: int) -> str:
        """Decoded after a letter, so that the decoder does not treat it as the start of a text."""
        anchor = self.backend.encode("a", add_special_tokens=False).ids[-1:]
        before = self.decode(anchor, skip_special_tokens=False)
        both = self.decode([*anchor, token_id] if token_id >= 0 else anchor, skip_special_tokens=False)
        return both[len(before) :]

    def _stream_bytes(self, skip_special_tokens: bool, token_id: int) -> bytes:
        return b"" if skip_special_tokens and token_id in self.special_ids else self.token_bytes(token_id)

    def _skips(self, skip_special_tokens: bool, token_id: int) -> bool:
        if skip_special_tokens and token_id in self.special_ids:
            return True
        return token_id < 0 or self.backend.id_to_token(token_id) is None

    def _fallback_byte(self, token_id: int) -> int | None:
        token = self.backend.id_to_token(token_id)
        return None if token is None else byte_of(token)


def load_tokenizer(model: str, *, tokenizer: str | None = None, revision: str | None = None) -> Tokenizer:
    """The tokenizer of ``model``, or of ``tokenizer`` if given.

    Args:
        model: as in ``open_checkpoint``: folder, GGUF file, "smollm2" or hub name.
        tokenizer: a folder, GGUF file or hub name to take the tokenizer from instead.
        revision: hub revision of ``model``; not applied to another ``tokenizer``.

    Raises:
        ModelError: nothing by that name, or no tokenizer that can be read without running code from its repository.
    """
    name = tokenizer or model
    source = locate(name, revision=revision if tokenizer is None else None, weights=False)
    if source.is_gguf:
        return from_gguf(read_header(source.path))
    return from_folder(source.path)


def from_gguf(header: GgufHeader) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    tokens: list[str] = header.get("tokenizer.ggml.tokens") or []
    backend = build_tokenizer(header)
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {f"{short}_token": header.get(f"tokenizer.ggml.{long}_token_id") for long, short in keys.items()}
    special = {k: tokens[i] for k, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    prefix = "tokenizer.chat_template."
    templates = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    if isinstance(default := header.get("tokenizer.chat_template"), str):
        templates[DEFAULT_TEMPLATE] = default
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_templates={k: v for k, v in templates.items() if isinstance(v, str)},
        eos_token_ids=end_token_ids(header),
    )


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face form."""
    config = _read_object(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} is not a readable tokenizer ({error}); download it again") from error
    else:
        backend = _through_transformers(folder)
    special = {k: v for k in NAMED_TOKENS if (v := _content(config.get(k))) is not None}
    return Tokenizer(backend, special_tokens=special, chat_templates=_templates(folder, config))


def _through_transformers(folder: Path) -> tokenizers.Tokenizer:
    fix = "give one that has tokenizer.json with tokenizer=<folder or hub name>"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{folder} has no tokenizer.json; pip install transformers to convert its files, or {fix}"
        ) from None
    try:
        found = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, use_fast=True, local_files_only=True
        )
    except Exception as error:  # whatever the converters raise, the user's way out is the same
        reason = " ".join(str(error).split())[:250]
        raise ModelError(
            f"{folder} has no tokenizer.json, and converting its files failed ({reason}); {fix}"
        ) from error
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: its tokenizer {type(found).__name__} has no fast form; {fix}")
    return backend


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files win over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates[DEFAULT_TEMPLATE] = given
    elif isinstance(given, list):
        named = [t for t in given if isinstance(t, dict)]
        templates = {str(t.get("name")): t["template"] for t in named if isinstance(t.get("template"), str)}
    old = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(old, str):
        templates[DEFAULT_TEMPLATE] = old
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            templates[name] = file.read_text(encoding="utf-8")
    return templates


def _content(token: Any) -> str | None:
    """A special token as tokenizer_config.json spells it: text, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}); download it again") from error
    return value if isinstance(value, dict) else {}
