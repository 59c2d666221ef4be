"""What the tiny model's 97 tokens read as, and grammars over them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jsonschema

from headway.api.structured.compile import Kind, Task, compile_task
from headway.core.automaton import Automaton, Vocabulary
from tests.engine.harness import Answer
from tests.engine.tiny_llama import EOS, VOCAB

_SINGLES = '{}[]",:.-_\\/+ \n0123456789abcdefghijklmnopqrstuvwxyzAZ'
_LONGER = [
    "ab",
    "abc",
    "the",
    " the",
    '"a',
    '":',
    '": ',
    '", "',
    "}\n",
    "12",
    "007",
    "true",
    "false",
    "null",
    "[]",
    "é",
    "  ",
]
_PARTS = [b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"x" * 33, b""]


def _tokens() -> list[bytes]:
    known = [text.encode() for text in [*_SINGLES, *_LONGER]] + _PARTS
    texts = iter(known + [b"z%d" % i for i in range(VOCAB)])
    return [b"" if token in EOS else next(texts) for token in range(VOCAB)]


TOKENS = _tokens()
VOCABULARY = Vocabulary.of(TOKENS)
USABLE = bytes(sorted(VOCABULARY.byte_set()))

PATTERN = r"[a-f]{2,12}(?: the)?\.?"
LOOP = r"[a-z0-9 é€]+"
LARK = 'start: "a" start? "b" | "{" start "}" | WORD\nWORD: /[c-z]{1,3}/'
"""Pairs, nested as deep as one likes: no table holds it."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "ab": {"type": "integer", "minimum": -7, "maximum": 120}},
    "required": ["a"],
}


@cache
def automaton(kind: Kind, text: str) -> Automaton:
    """A grammar over the tiny model's tokens."""
    outcome = compile_task(Task(kind, text, USABLE))
    assert outcome.automaton is not None, outcome
    return outcome.automaton


@cache
def host_grammar(kind: Kind, text: str) -> str:
    """The same for a grammar that is left to the host's matcher."""
    outcome = compile_task(Task(kind, text, USABLE))
    assert outcome.host_grammar is not None, outcome
    return outcome.host_grammar


def text_of(answer: Answer) -> str:
    """What the answer reads as."""
    return b"".join(TOKENS[token] for token in answer.token_ids).decode()


def holds(kind: Kind, wanted: Any, text: str) -> bool:
    """Whether a finished text is what was wanted, by libraries that know nothing of automata."""
    if kind == "regex":
        return re.fullmatch(wanted, text) is not None
    import json

    jsonschema.validate(json.loads(text), wanted)
    return True
