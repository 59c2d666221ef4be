"""Everything that schemas count, at its bounds and one beside: as automata and as the rules of the host's matcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headway.api.structured.compile import Task, compile_task
from headway.api.structured.host_grammar import ByteVocabulary, from_schema
from headway.api.structured.regex import RefusedError
from headway.core.automaton import MATCHER_LIMITS

MOST = 5
INTEGER: dict[str, Any] = {"type": "integer"}
Counted = tuple[str, str, dict[str, Any], Callable[[int], Any]]
COUNTED: dict[str, Counted] = {
    "items": ("minItems", "maxItems", {"type": "array", "items": INTEGER}, lambda n: [7] * n),
    "prefix": (
        "minItems",
        "maxItems",
        {"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "items": {"type": "boolean"}},
        lambda n: [7, None, *[True] * n][:n],
    ),
    "map": (
        "minProperties",
        "maxProperties",
        {"type": "object", "additionalProperties": INTEGER},
        lambda n: {f"k{i}": i for i in range(n)},
    ),
    "patterns": (
        "minProperties",
        "maxProperties",
        {"type": "object", "patternProperties": {"^k[0-9]$": INTEGER}, "additionalProperties": False},
        lambda n: {f"k{i}": i for i in range(n)},
    ),
    "members": (
        "minProperties",
        "maxProperties",
        {"type": "object", "properties": {f"k{i}": INTEGER for i in range(MOST)}},
        lambda n: {f"k{i}": i for i in range(n)},
    ),
    "text": ("minLength", "maxLength", {"type": "string"}, lambda n: "é" * n),
}
BOUNDS = [(least, most) for least in range(4) for most in (None, 0, 1, 2, 3, 4) if most is None or least <= most]


@cache
def tokenizer() -> Any:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()), n_vocab=257)


def automaton_accepts(schema: dict[str, Any]) -> Callable[[bytes], bool]:
    found = compile_task(Task("json", json.dumps(schema), bytes(range(256))))
    if found.refusal is not None:
        raise RefusedError(found.refusal)
    assert found.automaton is not None
    return lambda text: found.automaton is not None and found.automaton.accepts(text)


def matcher_accepts(schema: dict[str, Any]) -> Callable[[bytes], bool]:
    grammar = from_schema(schema)

    def accepts(text: bytes) -> bool:
        matcher = LLMatcher(tokenizer(), grammar, log_level=0, limits=LLParserLimits(**MATCHER_LIMITS))
        return bool(matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting())

    return accepts


@pytest.mark.parametrize("judge", [automaton_accepts, matcher_accepts])
@pytest.mark.parametrize("kind", COUNTED)
def test_counts_hold_exactly(kind: str, judge: Callable[[dict[str, Any]], Callable[[bytes], bool]]) -> None:
    low, high, plain, value = COUNTED[kind]
    for least, most in BOUNDS:
        schema = plain | ({low: least} if least else {}) | ({} if most is None else {high: most})
        if kind in ("map", "patterns") and least > 1:  # a model may repeat a name, and what is counted are names
            with pytest.raises(RefusedError, match="minProperties"):
                judge(schema)
            continue
        accepts = judge(schema)
        for number in range(MOST + 1):
            wanted = jsonschema.Draft202012Validator(schema).is_valid(value(number))
            assert wanted == (least <= number <= (MOST if most is None else most)), "the example is one of its number"
            text = json.dumps(value(number), ensure_ascii=False).encode()
            assert accepts(text) == wanted, f"{schema} and {text.decode()}"
