"""JSON schemas as automata or, in ``host_grammar``, as context-free rules.

Every text that comes out is JSON that validates; not every valid text does: properties come in the schema's order, properties
it does not name come only where it names none, and blanks are at most one, after a comma or a colon. A keyword that is not
honoured raises, so none is ever ignored. ``NotRegularError`` says that rules may hold what no table does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headway.api.structured import charset, merge, regex, shapes
from headway.api.structured.bounds import ends, factor, whole_bounds
from headway.api.structured.integers import MAX_DIGITS, between, multiples, number_pattern
from headway.api.structured.json_texts import (
    FORMATS,
    NUMBER,
    WHOLE,
    as_json,
    found_in_string,
    free_text,
    types_of,
    write_in_string,
)
from headway.api.structured.keywords import KNOWN, NOTES, OWN_KEYWORDS, asked_types, check_disjoint
from headway.api.structured.members import Member, members_of
from headway.api.structured.nfa import At, NotRegularError, Part, Pen
from headway.api.structured.regex import RefusedError

MAX_DEPTH = 64
MAX_REPEATS = 4096
"""Most characters, items or properties that are counted: what has a higher limit ends here."""


class SchemaBuilder:
    """Adds one schema to an automaton.

    Args:
        root: the whole schema; ``$ref`` points into it.
    """

    def __init__(self, pen: Pen, root: Any) -> None:
        self._pen, self._root = pen, root
        self._following: list[str] = []
        self._depth = 0

    def build(self, entry: At, schema: Any) -> At:
        """JSON that validates against ``schema``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotRegularError(f"it is nested over {MAX_DEPTH} deep")
        exit_ = self._build(entry, schema)
        self._depth -= 1
        return exit_

    def _build(self, entry: At, schema: Any) -> At:
        shapes.check(schema)
        if schema is True or (isinstance(schema, dict) and not schema.keys() - NOTES):
            return self._anything(entry)
        if schema is False:
            raise RefusedError("a place in it takes nothing (false)")
        unknown = sorted(schema.keys() - KNOWN)
        if unknown:
            raise RefusedError(f"the keyword {unknown[0]!r:.80} is not supported")
        if "allOf" in schema:
            return self.build(entry, merge.flattened(schema, self._resolve))
        others = schema.keys() - NOTES
        if "$ref" in schema:
            if others == {"$ref"}:
                return self._reference(entry, schema["$ref"])
            return self.build(entry, self._joined(schema))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any_of(entry, schema, keyword)
        if "const" in schema or "enum" in schema:
            return self._values(entry, schema)
        return self._typed(entry, schema)

    # -- what automata and rules do differently ---------------------------------------------------------------------

    def _leaf(self, entry: At, write: Callable[[Pen, At], At]) -> At:
        """A part without structure of its own."""
        return write(self._pen, entry)

    def _anything(self, entry: At) -> At:
        raise NotRegularError("a place in it takes any JSON")

    def _quoted(self, entry: At, demands: list[Callable[[Pen, At], At]]) -> At:
        """A string whose inside meets all demands."""
        if len(demands) > 1:
            raise NotRegularError("no table holds several demands on one string")

        def write(pen: Pen, at: At) -> At:
            return pen.text(demands[0](pen, pen.text(at, b'"')), b'"')

        return self._leaf(entry, write)

    def _reference(self, entry: At, target: Any) -> At:
        schema = self._resolve(target)
        if target in self._following:
            raise NotRegularError(f"$ref {target!r:.80} leads back to itself")
        self._following.append(target)
        exit_ = self.build(entry, schema)
        self._following.pop()
        return exit_

    # -- combinations ----------------------------------------------------------------------------------------------

    def _resolve(self, target: Any) -> Any:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise RefusedError(f"$ref {target!r:.80} does not point into the schema (#/...)")
        place = self._root
        for name in target.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and name.isdecimal() and len(name) < 6 and int(name) < len(place):
                place = place[int(name)]
            elif isinstance(place, dict) and name in place:
                place = place[name]
            else:
                raise RefusedError(f"$ref {target!r:.80} points to nothing")
        shapes.check(place)
        return place

    def _joined(self, schema: dict[str, Any]) -> Any:
        """What stands beside a ``$ref``, merged into what that points to."""
        rest = {name: value for name, value in schema.items() if name != "$ref" and name not in NOTES}
        return merge.merged(self._resolve(schema["$ref"]), rest, self._resolve)

    def _any_of(self, entry: At, schema: dict[str, Any], keyword: str) -> At:
        branches = schema[keyword]
        if not branches:
            raise RefusedError(f"{keyword} must be a list of at least one schema")
        rest = {name: value for name, value in schema.items() if name != keyword and name not in NOTES}
        if keyword == "oneOf":
            check_disjoint(branches, self._resolve)
        if rest:
            branches = [merge.merged(rest, branch, self._resolve) for branch in branches]
        branches = [branch for branch in branches if branch is not False]
        if not branches:
            raise RefusedError(f"nothing is left of {keyword}")
        return self._pen.either(entry, [partial(self.build, schema=branch) for branch in branches])

    def _values(self, entry: At, schema: dict[str, Any]) -> At:
        keyword = "const" if "const" in schema else "enum"
        others = sorted(schema.keys() - NOTES - {keyword, "type"})
        if others:
            raise RefusedError(
                f"{others[0]!r:.80} beside {keyword!r} is not supported; leave out the values it excludes"
            )
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not values:
            raise RefusedError("enum must be a list of at least one value")
        types = asked_types(schema)
        texts = {as_json(value) for value in values if types is None or types_of(value) & set(types)}
        if not texts:
            raise RefusedError(f"no value of {keyword} is of the type asked for")
        return self._leaf(entry, lambda pen, at: pen.either(at, [partial(pen.text, data=t) for t in sorted(texts)]))

    # -- types -----------------------------------------------------------------------------------------------------

    def _typed(self, entry: At, schema: dict[str, Any]) -> At:
        """A keyword speaks of the values of one type only: without ``type`` all the other types are valid, too."""
        types = asked_types(schema)
        given = schema.keys() - NOTES
        if types is None:
            types = [name for name, own in OWN_KEYWORDS.items() if given & own]
            if types != ["object"] and types != ["array"]:
                types = [name for name in OWN_KEYWORDS if name != "integer"]
        makers: dict[str, Callable[[At, dict[str, Any]], At]] = {
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

        if len(types) == 1:
            return makers[types[0]](entry, schema)
        return self._pen.either(entry, [part(name) for name in dict.fromkeys(types)])

    def _match(self, entry: At, pattern: str) -> At:
        return self._leaf(entry, lambda pen, at: regex.full_match(pen, at, pattern))

    def _string(self, entry: At, schema: dict[str, Any]) -> At:
        demands: list[Callable[[Pen, At], At]] = []
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise RefusedError(f"format {schema['format']!r:.80} is none of {', '.join(FORMATS)}")
            demands.append(lambda pen, at: regex.full_match(pen, at, FORMATS[schema["format"]]))
        if "pattern" in schema:
            demands.append(partial(found_in_string, pattern=schema["pattern"]))
        if "minLength" in schema or "maxLength" in schema:
            least, most = self._counts(schema, "minLength", "maxLength")
            char = charset.EVERY
            demands.append(lambda pen, at: pen.repeat(at, lambda start: write_in_string(pen, start, char), least, most))
        return self._quoted(entry, demands or [free_text])

    def _integer(self, entry: At, schema: dict[str, Any]) -> At:
        low, high = whole_bounds(schema)
        if "multipleOf" in schema:
            found = multiples(factor(schema["multipleOf"]), low, high)
            if not found:
                raise RefusedError("no multiple lies between minimum and maximum")
            return self._leaf(entry, lambda pen, at: pen.either(at, [partial(pen.text, data=b"%d" % n) for n in found]))
        if low is None and high is None:
            return self._match(entry, WHOLE)
        limit = 10**MAX_DIGITS - 1
        low, high = max(-limit if low is None else low, -limit), min(limit if high is None else high, limit)
        if low > high:
            raise RefusedError("no integer lies between minimum and maximum")
        parts = []
        for sign, least, most in ((b"-", max(1, -high), -low), (b"", max(0, low), high)):
            parts += [(sign, digits) for digits in between(least, most)] if least <= most else []

        def write(pen: Pen, at: At) -> At:
            return pen.either(at, [partial(_digits, pen, sign=sign, digits=digits) for sign, digits in parts])

        return self._leaf(entry, write)

    def _number(self, entry: At, schema: dict[str, Any]) -> At:
        if "multipleOf" in schema:
            return self._integer(entry, schema)
        low, high = ends(schema, "minimum", "exclusiveMinimum", max), ends(schema, "maximum", "exclusiveMaximum", min)
        if low[0] is None and high[0] is None:
            return self._match(entry, NUMBER)
        pattern = number_pattern(*low, *high)
        if not pattern:
            raise RefusedError("no number that can be written lies between minimum and maximum")
        return self._match(entry, pattern)

    def _array(self, entry: At, schema: dict[str, Any]) -> At:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = self._counts(schema, "minItems", "maxItems")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            raise RefusedError("no array has minItems items: maxItems or prefixItems leave room for fewer")
        prefix = prefix[: len(prefix) if most is None else most]
        entry = self._pen.text(entry, b"[")
        return self._pen.text(self._items(entry, prefix, items, 0, least, most), b"]")

    def _items(self, entry: At, prefix: list[Any], items: Any, count: int, least: int, most: int | None) -> At:
        """Behind ``count`` items: at least ``least`` and at most ``most`` in all."""
        if most is not None and count >= most:
            return entry

        def more(at: At) -> At:
            at = self._comma(at, count > 0)
            if count < len(prefix):
                return self._items(self.build(at, prefix[count]), prefix, items, count + 1, least, most)
            left = None if most is None else most - count - 1
            at = self.build(at, items)
            if left == 0:
                return at
            another: Part = lambda start: self.build(self._comma(start, True), items)  # noqa: E731
            return self._pen.repeat(at, another, max(least - count - 1, 0), left)

        return more(entry) if count < least else self._pen.either(entry, [lambda at: at, more])

    def _object(self, entry: At, schema: dict[str, Any]) -> At:
        least, most = self._counts(schema, "minProperties", "maxProperties")
        found = members_of(schema, least, most)
        entry = self._pen.text(entry, b"{")
        if found.values is not None:
            return self._pen.text(self._map(entry, found.pattern, found.values, least, most), b"}")
        return self._pen.text(self._members(entry, found.members, least, most), b"}")

    def _members(self, entry: At, members: list[Member], least: int, most: int | None) -> At:
        """Named members in their order. Where numbers of members are limited, they are counted."""
        required = sum(member.required for member in members)
        if least <= required and (most is None or most >= len(members)):
            return self._member_states(entry, members, 0, None, 1)
        most = len(members) if most is None else min(most, len(members))
        if len(members) * most > MAX_REPEATS:
            raise RefusedError("so many properties cannot be counted; leave minProperties or maxProperties out")
        return self._member_states(entry, members, least, most, max(most, 1))

    def _member_states(self, entry: At, members: list[Member], least: int, most: int | None, cap: int) -> At:
        """An automaton whose states are (member, how many came before it, up to ``cap``)."""
        states: dict[int, At] = {0: entry}
        for member in members:
            after: dict[int, list[At]] = {}
            for count, state in states.items():
                if not member.required:
                    after.setdefault(count, []).append(state)
                if most is None or count < most:
                    after.setdefault(min(count + 1, cap), []).append(self._member(state, member, count > 0))
            states = {count: self._meet(ends) for count, ends in after.items()}
        ends = [state for count, state in states.items() if count >= least]
        if not ends:
            raise RefusedError("minProperties, maxProperties and required cannot hold together")
        return self._meet(ends)

    def _meet(self, ends: list[At]) -> At:
        """Where several ways come together."""
        parts: list[Part] = [partial(_at, end) for end in ends]
        return self._pen.either(ends[0], parts)

    def _member(self, entry: At, member: Member, comma: bool) -> At:
        name = as_json(member.name)
        entry = self._leaf(self._comma(entry, comma), lambda pen, at: pen.text(at, name))
        return self.build(self._colon(entry), member.value)

    def _map(self, entry: At, pattern: str | None, values: Any, least: int, most: int | None) -> At:
        """Names that the pattern is found in, or any; values of one schema."""
        if most == 0:
            return entry
        key: Callable[[Pen, At], At] = free_text if pattern is None else partial(found_in_string, pattern=pattern)

        def pair(at: At) -> At:
            return self.build(self._colon(self._quoted(at, [key])), values)

        def some(at: At) -> At:
            left = None if most is None else most - 1
            return self._pen.repeat(pair(at), lambda start: pair(self._comma(start, True)), 0, left)

        return some(entry) if least else self._pen.either(entry, [lambda at: at, some])

    def _comma(self, entry: At, wanted: bool) -> At:
        return self._match(entry, ", ?") if wanted else entry

    def _colon(self, entry: At) -> At:
        return self._match(entry, ": ?")

    def _counts(self, schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
        least, most = schema.get(low, 0), schema.get(high)
        for name, value in ((low, least), (high, most)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RefusedError(f"{name} must be an integer >= 0, got {value!r:.80}")
        if most is not None and least > most:
            raise RefusedError(f"{low} is more than {high}")
        if least > MAX_REPEATS:
            raise RefusedError(f"{low} is over {MAX_REPEATS}")
        return least, None if most is None else min(most, MAX_REPEATS)


def _at(end: At, _: At) -> At:
    return end


def _digits(pen: Pen, entry: At, sign: bytes, digits: list[tuple[int, int]]) -> At:
    entry = pen.text(entry, sign)
    for low, high in digits:
        entry = pen.chars(entry, ((0x30 + low, 0x30 + high),))
    return entry
