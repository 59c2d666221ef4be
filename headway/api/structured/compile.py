"""From what a request asks for to an automaton. Runs in the worker process: nothing here is bounded in time."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import msgspec

from headway.api.structured import regex
from headway.api.structured.host_grammar import from_lark, from_schema
from headway.api.structured.json_schema import SchemaBuilder
from headway.api.structured.nfa import Nfa, NotRegularError
from headway.api.structured.regex import RefusedError
from headway.core.automaton import Automaton

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]


class Task(msgspec.Struct, frozen=True, array_like=True):
    """One grammar to compile.

    Attributes:
        text: a JSON schema as JSON, a pattern, the choices as a JSON list, a grammar; empty for json_object.
        usable: bytes that the vocabulary can spell.
    """

    kind: Kind
    text: str
    usable: bytes


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Either an automaton, or a grammar for the host's matcher, or the reason why there is neither.

    Attributes:
        not_regular: why no table holds it, when it is left to the host's matcher or refused for that.
    """

    automaton: Automaton | None = None
    host_grammar: str | None = None
    refusal: str | None = None
    not_regular: str | None = None


def compile_task(task: Task) -> Outcome:
    """Compile; whatever is wrong with the grammar is in the outcome."""
    reason = None
    try:
        if task.kind == "grammar":
            return Outcome(host_grammar=from_lark(task.text))
        if task.kind == "json_object":
            return Outcome(host_grammar=from_schema({"type": "object"}))
        try:
            return Outcome(automaton=_compile(task))
        except NotRegularError as error:
            reason = str(error)
        if task.kind != "json":
            return Outcome(refusal=reason, not_regular=reason)
        return Outcome(host_grammar=from_schema(_read_json(task.text)), not_regular=reason)
    except RefusedError as error:
        return Outcome(refusal=str(error), not_regular=reason)
    except RecursionError:
        return Outcome(refusal="it is nested too deeply")
    except MemoryError:
        return Outcome(refusal="it takes too much memory to compile")
    except (
        Exception
    ) as error:  # whatever a grammar of a stranger's brings about is that grammar's, and costs no process
        return Outcome(refusal=f"it cannot be read ({type(error).__name__})")


def _compile(task: Task) -> Automaton:
    nfa = Nfa()
    if task.kind == "regex":
        exit_ = regex.full_match(nfa, 0, task.text)
    elif task.kind == "choice":
        exit_ = nfa.either(0, [partial(nfa.text, data=_utf8(choice)) for choice in json.loads(task.text)])
    else:
        schema = _read_json(task.text)
        exit_ = SchemaBuilder(nfa, schema).build(0, schema)
    automaton = nfa.determinise(exit_, frozenset(task.usable))
    if automaton is None:
        raise RefusedError("no text that the model's tokens can spell satisfies it")
    if automaton.start >= automaton.first_accepting and not any(automaton.transitions[2 * automaton.num_classes :]):
        raise RefusedError("only the empty text satisfies it")
    return automaton


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RefusedError(f"it is not valid JSON: {error}") from None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RefusedError(f"{text!r:.80} is not valid Unicode") from None
