"""JSON schemas as automata.

Every text that the automaton accepts is JSON that validates; not every valid text is accepted: properties come in the
schema's order, properties it does not name never come, and blanks are at most one, after a comma or a colon. A keyword that
is not honoured raises, so none is ever ignored: ``NotRegularError`` where the host's matcher may do it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from headway.api.structured import charset, regex
from headway.api.structured.charset import CharSet
from headway.api.structured.integers import MAX_DIGITS, between
from headway.api.structured.nfa import Nfa, NotRegularError, Part
from headway.api.structured.regex import RefusedError

MAX_DEPTH = 64
MAX_REPEATS = 4096

NOTES = frozenset(
    [
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions", "$anchor"),
    ]
)
"""Keywords that say nothing about the text."""
OWN_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
KNOWN = NOTES | frozenset().union(*OWN_KEYWORDS.values()) | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}

_CONTROL: CharSet = charset.charset([(0, 0x1F)])
_RAW: CharSet = charset.minus(charset.EVERY, charset.union(_CONTROL, charset.of('"\\')))
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_HEX = "[0-9a-fA-F]"
_UNICODE = rf"\\u(?:[0-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
"""Escapes of everything but surrogates, which would have to come in pairs."""
_FRACTION = rf"(?:\.[0-9]{{1,{MAX_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE, _TIME = rf"[1-9][0-9]{{3}}-{_DAY}", r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "email": rf"[A-Za-z0-9_]+(?:[.+-][A-Za-z0-9_]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
}


def write_in_string(nfa: Nfa, entry: int, chars: CharSet) -> int:
    """One character of the set inside a JSON string: itself, or its short escape. Other control characters are left out."""
    exit_ = nfa.chars(entry, charset.minus(chars, charset.complement(_RAW)))
    for char, letter in _ESCAPES.items():
        if any(low <= ord(char) <= high for low, high in chars):
            nfa.join(nfa.text(entry, b"\\" + letter.encode()), exit_)
    return exit_


class SchemaBuilder:
    """Adds one schema to an automaton.

    Args:
        root: the whole schema; ``$ref`` points into it.
    """

    def __init__(self, nfa: Nfa, root: Any) -> None:
        self._nfa, self._root = nfa, root
        self._following: list[str] = []
        self._depth = 0

    def build(self, entry: int, schema: Any) -> int:
        """JSON that validates against ``schema``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotRegularError(f"it is nested over {MAX_DEPTH} deep")
        exit_ = self._build(entry, schema)
        self._depth -= 1
        return exit_

    def _build(self, entry: int, schema: Any) -> int:
        if schema is True or (isinstance(schema, dict) and not schema.keys() - NOTES):
            raise NotRegularError("a place in it takes any JSON")
        if not isinstance(schema, dict):
            raise RefusedError(f"a schema must be an object or true, got {schema!r:.80}")
        unknown = sorted(schema.keys() - KNOWN)
        if unknown:
            raise NotRegularError(f"no table holds the keyword {unknown[0]!r:.80}")
        for keyword, build in self._special().items():
            if keyword in schema:
                return build(entry, schema)
        return self._typed(entry, schema)

    def _special(self) -> dict[str, Callable[[int, dict[str, Any]], int]]:
        return {
            "$ref": self._reference,
            "const": self._values,
            "enum": self._values,
            "anyOf": self._any_of,
            "oneOf": self._any_of,
            "allOf": self._all_of,
        }

    def _only(self, schema: dict[str, Any], *keywords: str) -> None:
        """Raises when there is a keyword beside ``keywords`` that has a say."""
        others = sorted(schema.keys() - NOTES - set(keywords))
        if others:
            raise NotRegularError(f"no table holds {keywords[0]!r} beside {others[0]!r:.80}")

    # -- combinations ----------------------------------------------------------------------------------------------

    def _reference(self, entry: int, schema: dict[str, Any]) -> int:
        self._only(schema, "$ref")
        target = schema["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise RefusedError(f"$ref {target!r:.80} does not point into the schema (#/...)")
        if target in self._following:
            raise NotRegularError(f"$ref {target!r:.80} leads back to itself")
        self._following.append(target)
        exit_ = self.build(entry, self._resolve(target))
        self._following.pop()
        return exit_

    def _resolve(self, target: str) -> Any:
        place = self._root
        for name in target.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and name.isdecimal() and len(name) < 6 and int(name) < len(place):
                place = place[int(name)]
            elif isinstance(place, dict) and name in place:
                place = place[name]
            else:
                raise RefusedError(f"$ref {target!r:.80} points to nothing")
        return place

    def _values(self, entry: int, schema: dict[str, Any]) -> int:
        keyword = "const" if "const" in schema else "enum"
        self._only(schema, keyword, "type")
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise RefusedError("enum must be a list of at least one value")
        types = self._types(schema)
        texts = {_dump(value) for value in values if types is None or _types_of(value) & set(types)}
        if not texts:
            raise RefusedError(f"no value of {keyword} is of the type asked for")
        return self._nfa.either(entry, [partial(self._nfa.text, data=text) for text in sorted(texts)])

    def _any_of(self, entry: int, schema: dict[str, Any]) -> int:
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        self._only(schema, keyword)
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise RefusedError(f"{keyword} must be a list of at least one schema")
        if keyword == "oneOf":
            self._check_disjoint(branches)
        return self._nfa.either(entry, [partial(self.build, schema=branch) for branch in branches])

    def _check_disjoint(self, branches: list[Any]) -> None:
        """oneOf means exactly one: types or values must tell the branches apart."""
        seen: set[str] = set()
        for branch in branches:
            marks = self._marks(branch)
            if marks is None or marks & seen:
                raise NotRegularError("the branches of a oneOf may overlap; use anyOf")
            seen |= marks

    def _marks(self, schema: Any) -> set[str] | None:
        """Names of disjoint sets of values that cover the schema's; None when unknown."""
        if not isinstance(schema, dict):
            return None
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            plain = isinstance(values, list) and all(isinstance(v, str) for v in values)
            return {f"string:{value}" for value in values} if plain else None
        types = self._types(schema)
        if types is None:
            return None
        return {"number" if name == "integer" else name for name in types}

    def _all_of(self, entry: int, schema: dict[str, Any]) -> int:
        self._only(schema, "allOf")
        if not isinstance(schema["allOf"], list) or len(schema["allOf"]) != 1:
            raise NotRegularError("no table holds an allOf of several schemas")
        return self.build(entry, schema["allOf"][0])

    # -- types -----------------------------------------------------------------------------------------------------

    def _types(self, schema: dict[str, Any]) -> list[str] | None:
        """The types asked for; None when the keyword is absent."""
        if "type" not in schema:
            return None
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for name in types:
            if not isinstance(name, str) or name not in OWN_KEYWORDS:
                raise RefusedError(f"type {name!r:.80} is none of {', '.join(OWN_KEYWORDS)}")
        if not types:
            raise RefusedError("type must name at least one type")
        return types

    def _typed(self, entry: int, schema: dict[str, Any]) -> int:
        types = self._types(schema)
        if types is None:
            given = schema.keys() - NOTES
            types = [name for name, own in OWN_KEYWORDS.items() if given & own]
            if types != ["object"] and types != ["array"]:  # the others need their type, or any other would be valid
                raise NotRegularError("a place in it names no type")
        stray = sorted(schema.keys() - NOTES - {"type"} - frozenset().union(*(OWN_KEYWORDS[name] for name in types)))
        if stray:
            raise NotRegularError(f"no table holds {stray[0]!r} for type {' or '.join(types)}")
        makers: dict[str, Callable[[int, dict[str, Any]], int]] = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda at, _: self._match(at, "true|false"),
            "null": lambda at, _: self._match(at, "null"),
            "array": self._array,
            "object": self._object,
        }

        def part(name: str) -> Part:
            return lambda at: makers[name](at, schema)

        return self._nfa.either(entry, [part(name) for name in dict.fromkeys(types)])

    def _match(self, entry: int, pattern: str) -> int:
        return regex.full_match(self._nfa, entry, pattern)

    def _string(self, entry: int, schema: dict[str, Any]) -> int:
        nfa, given = self._nfa, [k for k in ("format", "pattern") if k in schema]
        bounded = "minLength" in schema or "maxLength" in schema
        if len(given) + bounded > 1:
            raise NotRegularError(f"no table holds {given[0]!r} beside another demand on a string")
        entry = nfa.text(entry, b'"')
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise NotRegularError(f"format {schema['format']!r:.80} is none of {', '.join(FORMATS)}")
            entry = self._match(entry, FORMATS[schema["format"]])
        elif "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise RefusedError("pattern must be text")
            entry = regex.search(nfa, entry, schema["pattern"], write_in_string, charset.EVERY)
        elif bounded:
            least, most = self._counts(schema, "minLength", "maxLength")
            entry = nfa.repeat(entry, lambda at: write_in_string(nfa, at, charset.EVERY), least, most)
        else:
            entry = nfa.repeat(entry, self._free_char, 0, None)
        return nfa.text(entry, b'"')

    def _free_char(self, entry: int) -> int:
        exit_ = write_in_string(self._nfa, entry, charset.EVERY)
        for pattern in (r"\\/", _UNICODE):
            self._nfa.join(self._match(entry, pattern), exit_)
        return exit_

    def _integer(self, entry: int, schema: dict[str, Any]) -> int:
        low, high = _bounds(schema)
        if low is None and high is None:
            return self._match(entry, rf"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})")
        limit = 10**MAX_DIGITS - 1
        low, high = max(-limit if low is None else low, -limit), min(limit if high is None else high, limit)
        if low > high:
            raise RefusedError("no integer lies between minimum and maximum")
        parts: list[Part] = []
        for sign, least, most in ((b"-", max(1, -high), -low), (b"", max(0, low), high)):
            for digits in between(least, most) if least <= most else ():
                parts.append(partial(self._digits, sign=sign, digits=digits))
        return self._nfa.either(entry, parts)

    def _digits(self, entry: int, sign: bytes, digits: list[tuple[int, int]]) -> int:
        entry = self._nfa.text(entry, sign)
        for low, high in digits:
            entry = self._nfa.chars(entry, ((0x30 + low, 0x30 + high),))
        return entry

    def _number(self, entry: int, schema: dict[str, Any]) -> int:
        return self._match(entry, rf"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}}){_FRACTION}")

    def _array(self, entry: int, schema: dict[str, Any]) -> int:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(prefix, list):
            raise RefusedError("prefixItems must be a list of schemas")
        least, most = self._counts(schema, "minItems", "maxItems")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            raise RefusedError("no array has minItems items: maxItems or prefixItems leave room for fewer")
        entry = self._nfa.text(entry, b"[")
        exit_ = self._nfa.state()
        count = 0
        while count < len(prefix) and (most is None or count < most):
            if count >= least:
                self._nfa.join(entry, exit_)
            entry = self.build(self._comma(entry, count > 0), prefix[count])
            count += 1
        self._nfa.join(self._more_items(entry, items, count, max(least - count, 0), most), exit_)
        return self._nfa.text(exit_, b"]")

    def _more_items(self, entry: int, items: Any, count: int, least: int, most: int | None) -> int:
        """Behind ``count`` items of the prefix, at least ``least`` more and ``most`` in all."""
        if most is not None and count >= most:
            return entry
        exit_ = self._nfa.state()
        if not least:
            self._nfa.join(entry, exit_)
        first = self.build(self._comma(entry, count > 0), items)
        left = None if most is None else most - count - 1

        def another(at: int) -> int:
            return self.build(self._comma(at, True), items)

        self._nfa.join(self._nfa.repeat(first, another, max(least - 1, 0), left), exit_)
        return exit_

    def _object(self, entry: int, schema: dict[str, Any]) -> int:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise RefusedError("properties must be an object and required a list")
        missing = [name for name in required if name not in properties]
        if missing:
            raise NotRegularError(f"the required property {missing[0]!r:.80} is not among the properties")
        entry = self._nfa.text(entry, b"{")
        if not properties and others is not False:
            return self._nfa.text(self._map(entry, others), b"}")
        empty, filled = entry, self._nfa.state()
        for name, value in properties.items():
            start = self._nfa.state()
            self._nfa.join(empty, start)
            self._nfa.join(self._comma(filled, True), start)
            end = self.build(self._colon(self._nfa.text(start, _dump(name))), value)
            before, filled = filled, self._nfa.state()
            self._nfa.join(end, filled)
            empty_before, empty = empty, self._nfa.state()
            if name not in required:
                self._nfa.join(before, filled)
                self._nfa.join(empty_before, empty)
        exit_ = self._nfa.state()
        self._nfa.join(empty, exit_)
        self._nfa.join(filled, exit_)
        return self._nfa.text(exit_, b"}")

    def _map(self, entry: int, values: Any) -> int:
        """Any names, values of one schema."""

        def pair(at: int) -> int:
            return self.build(self._colon(self._string(at, {})), values)

        exit_ = self._nfa.state()
        self._nfa.join(entry, exit_)
        more = self._nfa.repeat(pair(entry), lambda at: pair(self._comma(at, True)), 0, None)
        self._nfa.join(more, exit_)
        return exit_

    def _comma(self, entry: int, wanted: bool) -> int:
        return self._match(entry, ", ?") if wanted else entry

    def _colon(self, entry: int) -> int:
        return self._match(entry, ": ?")

    def _counts(self, schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        for name, value in ((low, least), (high, most)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RefusedError(f"{name} must be an integer >= 0, got {value!r:.80}")
        if most is not None and least > most:
            raise RefusedError(f"{low} is more than {high}")
        if max(least, most or 0) > MAX_REPEATS:
            raise NotRegularError(f"{low} or {high} is over {MAX_REPEATS}")
        return least, most


def _bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Lowest and highest integer that the bounds leave."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(name, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise RefusedError(f"{name} must be a number, got {value!r:.80}")
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(lows, default=None), min(highs, default=None)


def _dump(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError):
        raise RefusedError(f"{value!r:.80} cannot be written as JSON text") from None


def _types_of(value: Any) -> set[str]:
    """Names of the types that a value is of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}
