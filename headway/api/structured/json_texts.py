"""The texts of JSON's scalars: strings and what is demanded of them, literals."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from headway.api.structured import charset, regex
from headway.api.structured.charset import CharSet
from headway.api.structured.integers import MAX_DIGITS
from headway.api.structured.nfa import At, Part, Pen
from headway.api.structured.regex import RefusedError

_CONTROL: CharSet = charset.charset([(0, 0x1F)])
_RAW: CharSet = charset.minus(charset.EVERY, charset.union(_CONTROL, charset.of('"\\')))
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_HEX = "[0-9a-fA-F]"
_UNICODE = rf"\\u(?:[0-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
"""Escapes of everything but surrogates, which would have to come in pairs."""
WHOLE = rf"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
NUMBER = rf"{WHOLE}(?:\.[0-9]{{1,{MAX_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE, _TIME = rf"[1-9][0-9]{{3}}-{_DAY}", r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "duration": r"P(?:[1-9][0-9]{0,3}[DW]|T[1-9][0-9]{0,3}[HMS])",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": rf"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "email": rf"[A-Za-z0-9_]+(?:[.+-][A-Za-z0-9_]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": _HOST,
    "uri": rf"https?://{_HOST}(?:/[A-Za-z0-9_.~-]{{1,64}}){{0,16}}/?(?:\?[A-Za-z0-9_.~=&-]{{1,128}})?",
}


def write_in_string(pen: Pen, entry: At, chars: CharSet) -> At:
    """One character of the set inside a JSON string: itself, or its short escape. Other control characters are left out."""
    raw = charset.minus(chars, charset.complement(_RAW))
    parts: list[Part] = [partial(pen.chars, chars=raw)] if raw else []
    for char, letter in _ESCAPES.items():
        if any(low <= ord(char) <= high for low, high in chars):
            parts.append(partial(pen.text, data=b"\\" + letter.encode()))
    if not parts:
        raise RefusedError("a pattern asks for a control character, which strings here do not hold")
    return parts[0](entry) if len(parts) == 1 else pen.either(entry, parts)


def free_text(pen: Pen, entry: At) -> At:
    """What any JSON string may hold."""

    def one(at: At) -> At:
        parts: list[Part] = [lambda start: write_in_string(pen, start, charset.EVERY)]
        parts += [partial(_matched, pen, pattern=pattern) for pattern in (r"\\/", _UNICODE)]
        return pen.either(at, parts)

    return pen.repeat(entry, one, 0, None)


def _matched(pen: Pen, entry: At, pattern: str) -> At:
    return regex.full_match(pen, entry, pattern)


def found_in_string(pen: Pen, entry: At, pattern: str) -> At:
    """The inside of a string in which the pattern is found."""
    return regex.search(pen, entry, pattern, write_in_string, charset.EVERY)


def as_json(value: Any) -> bytes:
    """Raises RefusedError: it has no JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError):
        raise RefusedError(f"{value!r:.80} cannot be written as JSON text") from None


def types_of(value: Any) -> set[str]:
    """Names of the types that a value is of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}
