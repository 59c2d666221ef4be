"""What no table holds, as a grammar for the matcher on the host: Lark grammars, any JSON object, recursive schemas.

Schemas become rules by the same description as automata (``json_schema``), so they promise the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from headway.api.structured.json_schema import SchemaBuilder
from headway.api.structured.keywords import NOTES
from headway.api.structured.members import Member
from headway.api.structured.nfa import At, NotRegularError, Pen
from headway.api.structured.regex import RefusedError
from headway.api.structured.rules import Drawn, Pattern, Rules, Symbol
from headway.core.automaton import MATCHER_LIMITS

MAX_PATTERN = MATCHER_LIMITS["max_lexer_states"] - 8000
"""Most characters that one pattern may count off: on the way through it the matcher keeps a state for each."""
TRIED_BYTES = 8
"""So far the door follows a grammar, to see whether the matcher's limits let it."""
ALL_BYTES = (1 << 256) - 1
_ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}


class RulesBuilder(SchemaBuilder):
    """Schemas as rules. What has structure is a rule, what has none is one regular expression."""

    def __init__(self, pen: Rules, root: Any) -> None:
        super().__init__(cast("Any", pen), root)  # what would need single characters is a leaf here
        self._rules = pen
        self._objects = 0

    def build(self, entry: At, schema: Any) -> At:
        """JSON that validates against ``schema``: for an object or array a rule, which all places with this schema share."""
        if not isinstance(schema, dict) or not schema.keys() - NOTES or schema.keys() <= {"$ref"} | NOTES:
            return super().build(entry, schema)
        name = json.dumps({key: value for key, value in schema.items() if key not in NOTES})
        return self._rules.rule(entry, name, lambda at: super(RulesBuilder, self).build(at, schema))

    def _leaf(self, entry: At, write: Callable[[Pen, At], At]) -> At:
        return self._rules.regex(entry, [_short(write(Pattern(), Drawn()))])

    def _quoted(self, entry: At, demands: list[Callable[[Pen, At], At]]) -> At:
        return self._rules.regex(entry, [f'"{_short(demand(Pattern(), Drawn()))}"' for demand in demands])

    def _anything(self, entry: At) -> At:
        return self._rules.rule(entry, "anything", lambda at: self._typed(at, _ANYTHING))

    def _reference(self, entry: At, target: Any) -> At:
        schema = self._resolve(target)
        return self._rules.rule(entry, f"$ref {target}", lambda at: self.build(at, schema))

    def _member_states(self, entry: At, members: list[Member], least: int, most: int | None, cap: int) -> At:
        """A rule for each (member, how many came before it): what may follow from there on."""
        self._objects += 1
        name = f"members {self._objects} "
        for number in range(len(members), -1, -1):
            for count in range(min(number, cap) + 1):
                after: list[At] = []
                if number == len(members):
                    after = [()] if count >= least else []
                else:
                    member = members[number]
                    if most is None or count < most:
                        target = f"{name}{number + 1} {min(count + 1, cap)}"
                        after.append((*self._member((), member, count > 0), Symbol("rule", target)))
                    if not member.required:
                        after.append((Symbol("rule", f"{name}{number + 1} {count}"),))
                self._rules.define(f"{name}{number} {count}", (Symbol("either", tuple(after)),))
        return (*entry, Symbol("rule", f"{name}0 0"))


def _short(pattern: Drawn) -> str:
    """Raises RefusedError: the matcher would run out of states on the way through."""
    if pattern.length > MAX_PATTERN:
        raise RefusedError(
            f"a text or pattern in it counts {pattern.length} characters, at most {MAX_PATTERN} fit; shorten it"
        )
    return pattern.text


def from_schema(schema: Any) -> str:
    """A grammar of the schema's JSON. Raises RefusedError when it cannot be honoured whole."""
    rules = Rules()
    try:
        whole = RulesBuilder(rules, schema).build((), schema)
    except NotRegularError as error:
        raise RefusedError(str(error)) from None
    return _checked(lambda: _lark(rules.lark(whole)))


def from_lark(text: str) -> str:
    """A grammar in Lark's syntax. Raises RefusedError when it is not valid."""
    return _checked(lambda: _lark(text))


def _first_fault(grammar: str) -> str:
    """What is wrong with a grammar, seen by taking a matcher with the engine's limits some steps; "" if nothing is.

    The library looks ahead as far as a grammar forces a text, which may be further than its limits allow.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), n_vocab=257)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**MATCHER_LIMITS))
    for _ in range(TRIED_BYTES):
        allowed = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little") & ALL_BYTES
        if not allowed or matcher.is_error():
            break
        matcher.try_consume_tokens([(allowed & -allowed).bit_length() - 1])  # the lowest
    return str(matcher.get_error()) if matcher.is_error() else ""


class ByteVocabulary:
    """A vocabulary of bytes."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _lark(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def _checked(make: Callable[[], str]) -> str:

    try:
        grammar = make()
        error = _first_fault(grammar)
    except RefusedError:
        raise
    except BaseException as failure:  # the library's panics are no Exceptions
        error = str(failure) or type(failure).__name__
    if "NoExtensionBias" in error:
        raise RefusedError("no text of finite length satisfies it")
    if error:
        raise RefusedError(" ".join(error.replace("<non-verbose/>", "").split())[:300])
    return grammar
