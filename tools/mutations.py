"""Small mistakes, made of Python's syntax tree: every single change of a file, few of which are no Python.

Each changes one place of one line, and only lines that occur once in their file are changed, so that a mistake can be written
down as a planted fault (``old`` becomes ``new``). Comments, docstrings, messages, assertions and imports are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_CODE = ("raise ", "assert ", "logger.", "import ", "from ", "def ", "async def ", "class ", "@", '"', "'")
"""How lines begin that say something rather than do it. Defaults of a ``def`` on lines of their own are changed."""

Operator = type[ast.operator] | type[ast.cmpop] | type[ast.boolop]
SWAPS: dict[Operator, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
"""What stands there, and what is put in its place."""
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
NAMES |= {"add": "discard", "True": "False", "False": "True"}


class Mutation(NamedTuple):
    """A change of one line.

    Attributes:
        number: of the line, from 1.
        old, new: the line as it is, and as it becomes, without indentation.
        what: what was done.
        kind: operator, value, call, statement or name.
    """

    file: str
    number: int
    old: str
    new: str
    what: str
    kind: str


def is_python(mutation: Mutation) -> bool:
    """Whether the file with the mistake can be read. It takes milliseconds, so ask of those that are drawn."""
    lines = (ROOT / mutation.file).read_text(encoding="utf-8").splitlines()
    indent = lines[mutation.number - 1].partition(mutation.old)[0]
    try:
        ast.parse("\n".join([*lines[: mutation.number - 1], indent + mutation.new, *lines[mutation.number :]]))
    except SyntaxError:
        return False
    return True


class Change(NamedTuple):
    """Characters ``start`` to ``end`` of a line become ``new``."""

    number: int
    start: int
    end: int
    new: str
    what: str


def mutations(path: Path) -> Iterator[Mutation]:
    """All of them, in the order of the tree; no two make the same line of one."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    stripped = [line.strip() for line in lines]
    seen: set[tuple[int, str]] = set()
    for kind, change in _changes(ast.parse(text), lines):
        line = lines[change.number - 1]
        new = line[: change.start] + change.new + line[change.end :]
        said = stripped[change.number - 1]
        if stripped.count(said) != 1 or said.startswith(NOT_CODE) or new == line or (change.number, new) in seen:
            continue
        seen.add((change.number, new))
        yield Mutation(str(path.relative_to(ROOT)), change.number, said, new.strip(), change.what, kind)


def _changes(tree: ast.Module, lines: list[str]) -> Iterator[tuple[str, Change]]:
    """Kinds and changes of all nodes but those of annotations and docstrings."""
    names = _Names()
    for node, function in _code(tree, tree):
        found = {
            "operator": _of_operators(node, lines),
            "value": _of_values(node),
            "call": _of_calls(node, lines),
            "statement": _of_statements(node),
            "name": _of_names(node, function, names),
        }
        yield from ((kind, change) for kind, changes in found.items() for change in changes)


def _code(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node that is computed, and the function it is in."""
    yield node, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "op", "ops"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_text:
                yield from _code(
                    child, child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
                )


def _put(node: ast.expr | ast.stmt, new: str, what: str) -> Iterator[Change]:
    """``new`` in place of a node that lies on one line."""
    if node.lineno == node.end_lineno and node.end_col_offset is not None:
        yield Change(node.lineno, node.col_offset, node.end_col_offset, new, what)


def _between(left: ast.expr, right: ast.expr, op: ast.AST, lines: list[str]) -> Iterator[Change]:
    """Another operator between two operands."""
    if type(op) not in SWAPS or left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    old, new = SWAPS[type(op)]  # type: ignore[index]
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    at = left.end_col_offset + gap.find(old)
    if old in gap:
        yield Change(right.lineno, at, at + len(old), new, f"{old} became {new}")


def _of_operators(node: ast.AST, lines: list[str]) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            yield from _between(left, right, op, lines)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between(left, right, node.op, lines)
    elif isinstance(node, ast.BinOp):
        yield from _between(node.left, node.right, node.op, lines)
    elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPS and node.target.end_lineno == node.value.lineno:
        old, new = SWAPS[type(node.op)]
        at = lines[node.lineno - 1].find(f"{old}=", node.target.end_col_offset or 0)
        if at >= 0:
            yield Change(node.lineno, at, at + len(old), new, f"{old}= became {new}=")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _put(node, ast.unparse(node.operand), "not is left out")
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        yield from _put(node.test, f"(not ({ast.unparse(node.test)}))", "the condition is negated")


def _of_values(node: ast.AST) -> Iterator[Change]:
    """Constants, defaults among them, and bounds of slices and ranges."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield from _put(node, str(not node.value), f"{node.value} became {not node.value}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        near = {2 * node.value} if node.value >= 64 else {node.value + 1, max(node.value - 1, 0)} - {node.value}
        for new in sorted(near):
            yield from _put(node, str(new), f"{node.value} became {new}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield from _put(node, repr(node.value * 2 or 0.5), f"{node.value} became {node.value * 2 or 0.5}")
    bounds: list[ast.expr | None] = []
    if isinstance(node, ast.Slice):
        bounds = [node.lower, node.upper]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [*node.args[:2]]
    for bound in bounds:
        if bound is not None and not isinstance(bound, ast.Constant | ast.Starred):
            for sign in "+-":
                yield from _put(bound, f"{ast.unparse(bound)} {sign} 1", f"a bound {sign} 1")


def _of_calls(node: ast.AST, lines: list[str]) -> Iterator[Change]:
    """Two neighbouring arguments change places; an argument with a default is not passed."""
    if not isinstance(node, ast.Call):
        return
    is_symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    for one, other in zip(node.args, node.args[1:], strict=False):
        plain = all(isinstance(each, ast.Name | ast.Attribute) for each in (one, other))
        if plain and not is_symmetric and one.lineno == other.end_lineno:
            swapped = f"{ast.unparse(other)}, {ast.unparse(one)}"
            yield Change(one.lineno, one.col_offset, other.end_col_offset or 0, swapped, "two arguments change places")
    for keyword in node.keywords:
        if keyword.arg and keyword.lineno == keyword.end_lineno:
            line, end = lines[keyword.lineno - 1], keyword.end_col_offset or 0
            end += len(line[end:]) - len(line[end:].lstrip(", "))
            yield Change(keyword.lineno, keyword.col_offset, end, "", f"{keyword.arg}= is not passed")


def _of_statements(node: ast.AST) -> Iterator[Change]:
    """Statements that are left out, or end the function or the loop."""
    if not isinstance(node, ast.stmt):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield from _put(node, "pass", "the call is left out")
    elif isinstance(node, ast.AugAssign):
        yield from _put(node, "pass", f"{ast.unparse(node.target)} is not updated")
    elif isinstance(node, ast.Assign) and all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets):
        yield from _put(node, "pass", f"{ast.unparse(node.targets[0])} is not set")
    elif isinstance(node, ast.Continue):
        yield from _put(node, "break", "continue became break")
    elif isinstance(node, ast.Break):
        yield from _put(node, "continue", "break became continue")
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
        yield from _put(node.value, ast.unparse(node.value.body), "only one of two values is returned")


class _Names:
    """What there is in the functions of a file, each of which is searched once."""

    def __init__(self) -> None:
        self.locals = cache(_locals)
        self.attributes = cache(_attributes)


def _of_names(node: ast.AST, function: ast.AST, names: _Names) -> Iterator[Change]:
    """The wrong one of two names: opposites, and locals or attributes of ``self`` that share a word."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from _put(node, NAMES.get(node.id, node.id), f"{node.id} became {NAMES.get(node.id)}")
        for other in sorted(names.locals(function)):
            if _alike(node.id, other):
                yield from _put(node, other, f"{node.id} became {other}")
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        owner = ast.unparse(node.value)
        same = names.attributes(function).get(owner, set())
        for other in sorted({*same, NAMES.get(node.attr, node.attr)}):
            if _alike(node.attr, other) or NAMES.get(node.attr) == other:
                yield from _put(node, f"{owner}.{other}", f"{node.attr} became {other}")


def _locals(function: ast.AST) -> frozenset[str]:
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset()
    stored = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return frozenset(stored | {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)} - {"self", "cls"})


def _attributes(function: ast.AST) -> Mapping[str, set[str]]:
    """By what they belong to, as it is written."""
    found: dict[str, set[str]] = {}
    for each in ast.walk(function):
        if isinstance(each, ast.Attribute):
            found.setdefault(ast.unparse(each.value), set()).add(each.attr)
    return found


def _alike(name: str, other: str) -> bool:
    """Whether two names share a word of three letters or more, such as ``first_row`` and ``last_row``."""
    words = [{word for word in each.split("_") if len(word) > 2} for each in (name, other)]
    return name != other and bool(words[0] & words[1])
