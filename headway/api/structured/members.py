"""Which members an object of a schema gets."""

from __future__ import annotations

from typing import Any, NamedTuple

from headway.api.structured import charset, regex
from headway.api.structured.nfa import Nfa
from headway.api.structured.regex import RefusedError


class Member(NamedTuple):
    """One named member."""

    name: str
    value: Any
    required: bool


class Members(NamedTuple):
    """Either named members, or any names (in which ``pattern`` is found) with ``values`` of one schema."""

    members: list[Member]
    pattern: str | None = None
    values: Any = None


def members_of(schema: dict[str, Any], least: int, most: int | None) -> Members:
    """The members of an object. Names that the schema does not name come only where it names none.

    Raises:
        RefusedError: the schema is wrong, or no order of its members is known to validate.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others, patterns = schema.get("additionalProperties", True), schema.get("patternProperties", {})
    for name in required:
        if name not in properties:
            properties = {**properties, name: _value_of(name, patterns, others)}
    for name in properties:
        if name in schema.get("properties", {}) and any(_found(pattern, name) for pattern in patterns):
            raise RefusedError(f"the property {name!r:.80} is named and also meant by patternProperties; say it once")
    if properties:
        kept = {name: value for name, value in properties.items() if value is not False}
        gone = [name for name in required if name not in kept]
        if gone:
            raise RefusedError(f"the required property {gone[0]!r:.80} may not come (false)")
        members = [Member(name, value, name in required) for name, value in kept.items()]
        if least > len(members):
            raise RefusedError(f"minProperties is {least}, but {len(members)} properties are named; name as many")
        if most is not None and sum(member.required for member in members) > most:
            raise RefusedError("more properties are required than maxProperties allows")
        return Members(members)
    if least > 1:
        raise RefusedError("minProperties above 1 needs named properties: names of a model's choice may repeat")
    if len(patterns) > 1:
        raise RefusedError("several patternProperties are not supported: a name may meet two of them; use one")
    if patterns:
        [(pattern, value)] = patterns.items()
        regex.parse(pattern)
        if value is not False:
            return Members([], pattern, value)
        others = False  # names that the pattern leaves could come; none do
    if others is False or most == 0:
        if least:
            raise RefusedError("minProperties asks for a property, and none may come")
        return Members([])
    return Members([], None, others)


def _value_of(name: str, patterns: dict[str, Any], others: Any) -> Any:
    """What a property must be that is required and not named."""
    met = [value for pattern, value in patterns.items() if _found(pattern, name)]
    if len(met) > 1:
        raise RefusedError(f"the required property {name!r:.80} meets two patternProperties; name it")
    value = met[0] if met else others
    if value is False:
        raise RefusedError(f"the required property {name!r:.80} may not come: additionalProperties is false")
    return value


def _found(pattern: str, name: str) -> bool:
    """Whether the pattern is found in the name, as our automata read patterns."""
    nfa = Nfa()
    end = regex.search(nfa, 0, pattern, regex.plain, charset.EVERY)
    automaton = nfa.determinise(end, frozenset(range(256)))
    return automaton is not None and automaton.accepts(name.encode())
