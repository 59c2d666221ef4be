"""What no table holds, as a grammar for the matcher on the host: Lark grammars, any JSON object, recursive schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headway.api.structured.json_schema import KNOWN
from headway.api.structured.regex import RefusedError

MORE_KEYWORDS = frozenset(("multipleOf", "patternProperties", "minProperties", "maxProperties"))
"""Keywords the matcher honours beyond those a table can hold. It ignores ones it never heard of, so they are refused here."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def from_schema(schema: Any) -> str:
    """A grammar of the schema's JSON. Raises RefusedError when the matcher does not honour it whole."""
    _check_keywords(schema, "#")
    from llguidance import LLMatcher

    return _checked(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_STYLE))


def from_lark(text: str) -> str:
    """A grammar in Lark's syntax. Raises RefusedError when it is not valid."""
    from llguidance import LLMatcher

    return _checked(lambda: LLMatcher.grammar_from_lark(text))


def _checked(make: Callable[[], str]) -> str:
    from llguidance import LLMatcher

    try:
        grammar = make()
        error = LLMatcher.validate_grammar(grammar)
    except BaseException as failure:  # the library's panics are no Exceptions
        error = str(failure) or type(failure).__name__
    if error:
        raise RefusedError(" ".join(error.split())[:300])
    return grammar


def _check_keywords(schema: Any, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RefusedError(f"{where}: a schema must be an object, true or false, got {schema!r:.80}")
    unknown = sorted(schema.keys() - KNOWN - MORE_KEYWORDS)
    if unknown:
        raise RefusedError(f"{where}: the keyword {unknown[0]!r:.80} is not supported")
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            for name, value in schema[keyword].items():
                _check_keywords(value, f"{where}/{keyword}/{name}"[:200])
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            for i, value in enumerate(schema[keyword]):
                _check_keywords(value, f"{where}/{keyword}/{i}"[:200])
    for keyword in _SINGLES:
        if keyword in schema:
            _check_keywords(schema[keyword], f"{where}/{keyword}"[:200])
