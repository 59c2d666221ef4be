"""A byte tokenizer, and LLM / AsyncLLM over the fake engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headway.api import frontend
from headway.api.control_text import ControlTexts
from headway.api.text_stream import ByteLevelStream
from headway.core.config import EngineArgs
from headway.engine.client import EngineClient, InprocClient, ThreadClient
from headway.engine.process import ProcessClient
from tests.engine import fake_core

FACTORY = "tests.engine.fake_core:build"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """Ids 0..255 are bytes; 256 is the special token "<eos>"; others have no text. Or, with ``table``, any pieces."""

    def __init__(self, table: list[bytes] | None = None, template: str | None = TEMPLATE) -> None:
        self.table = table or [bytes([i]) for i in range(256)] + [b"<eos>"]
        self.template = template
        self.vocab_size = len(self.table)
        self.special_ids = frozenset([fake_core.EOS])
        self.special_tokens: dict[str, str] = {}
        self.control_texts = ControlTexts(())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self._bytes(i, skip_special_tokens) for i in ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def new_stream(self, prompt_ids_tail: Sequence[int] = (), skip_special_tokens: bool = True) -> ByteLevelStream:
        return ByteLevelStream(lambda i: self._bytes(i, skip_special_tokens), prompt_ids_tail[-16:])

    def pick_template(self, has_tools: bool = False) -> str | None:
        return self.template

    def _bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if token_id >= len(self.table) or (skip_special_tokens and token_id in self.special_ids):
            return b""
        return self.table[token_id]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make LLM and AsyncLLM use the fake engine and tokenizer."""

    def connect(args: EngineArgs, *, own_process: bool, asynchronous: bool) -> EngineClient:
        if args.multiprocess:  # slow to start: only where a test asks for it
            return ProcessClient(args, FACTORY)
        return ThreadClient(args, FACTORY) if asynchronous else InprocClient(args, FACTORY)

    monkeypatch.setattr(frontend, "connect", connect)
    monkeypatch.setattr(frontend, "load_tokenizer", lambda args: None if args.skip_tokenizer_init else ByteTokenizer())
