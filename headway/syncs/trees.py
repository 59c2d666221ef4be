"""Decision trees over the kinds of a call's arguments (``syncs.kinds``), grown by ``bench/syncs_rules.py`` from what a card
did.

A leaf is true (waits) or false, a node is [question, if yes, if no].

Questions: "3" more than three positional arguments; "name=" an argument given by that name; "0:empty", "0:cpu", "name:True"
that word among the kind of an argument; "0>2" more than two dimensions.
"""

from __future__ import annotations

from typing import Any

Tree = bool | list[Any]
Kinds = dict[str, str]
"""Position or name of an argument -> its kind."""


def parse(text: str) -> Kinds:
    """The kinds of a whole call as the record has them: "cuda:float32:2d; int; dim=int"."""
    found: Kinds = {}
    for position, part in enumerate(text.split("; ") if text else ()):
        name, equals, kind = part.partition("=")
        if equals and name.isidentifier():
            found[name] = kind
        else:
            found[str(position)] = part
    return found


def holds(question: str, kinds: Kinds) -> bool:
    """The answer to one question."""
    if question.endswith("="):
        return question[:-1] in kinds
    if question.isdigit():
        return sum(name.isdigit() for name in kinds) > int(question)
    if ">" in question:
        name, _, most = question.partition(">")
        return dimensions(kinds.get(name, "")) > int(most)
    name, _, word = question.partition(":")
    return word in kinds.get(name, "").split(":")


def dimensions(kind: str) -> int:
    """Of a tensor's kind; -1 for anything else."""
    parts = kind.split(":")
    return int(parts[2][:-1]) if len(parts) > 2 and parts[2].endswith("d") and parts[2][:-1].isdigit() else -1


def decide(tree: Tree, kinds: Kinds) -> bool:
    """Whether a call with arguments of these kinds waits."""
    while isinstance(tree, list):
        question, yes, no = tree
        tree = yes if holds(question, kinds) else no
    return tree
