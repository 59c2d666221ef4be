"""The numbers that the package gives names to: limits, time-outs, sizes of tables, what a record's fields and a function's
arguments are unless somebody says otherwise, as ``python -m tests.house.constants`` lists them.

They stand in constants.txt, too: tests compare with a limit by its name, and so follow it wherever a slip of a key takes it.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.house.source import ROOT

LISTED = Path(__file__).parent / "constants.txt"
APART = ("kernels", "syncs")
"""Kernels' constants are tiles that their own tests vary; ``syncs`` is no part of what serves."""
RECORDS_APART = ("core",)
"""tests/core/test_defaults.py and tests/api/test_arguments.py say what its records' fields are."""
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv, ast.LShift: operator.lshift, ast.USub: operator.neg,
}  # fmt: skip


def number(node: ast.AST | None) -> float | None:
    """The value of an expression of nothing but numbers; None: it is another one."""
    if ast.unparse(node or ast.Pass()) == "float('inf')":
        return math.inf
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    parts = (
        [node.operand]
        if isinstance(node, ast.UnaryOp)
        else [node.left, node.right]
        if isinstance(node, ast.BinOp)
        else []
    )
    values = [number(part) for part in parts]
    if not values or None in values or type(getattr(node, "op", None)) not in OPERATORS:
        return None
    return OPERATORS[type(node.op)](*values)  # type: ignore[union-attr]


def named(text: str) -> Iterator[tuple[str, float]]:
    """Names and numbers that a module, or a class at its top, assigns, one or several at a time."""
    body = ast.parse(text).body
    yield from _assigned(body)
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from ((f"{statement.name}.{name}", value) for name, value in _assigned(statement.body))


def assumed(text: str) -> Iterator[tuple[str, float]]:
    """Flags of records, and numbers and flags of functions' arguments, as ``A.f(x)``: what they are unless somebody says."""
    for path, node in _definitions(ast.parse(text), ""):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(value := _constant(statement.value), bool):
                    yield f"{path}.{ast.unparse(statement.target)}", value
            continue
        arguments = node.args
        places = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(places[len(places) - len(arguments.defaults) :], arguments.defaults, strict=True)]
        for argument, default in [*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
            value = number(default)
            value = _constant(default) if value is None else value
            if isinstance(value, int | float):
                yield f"{path}({argument.arg})", value


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _definitions(
    node: ast.AST, path: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{path}.{child.name}".removeprefix(".")
            yield name, child
            yield from _definitions(child, name)


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, float]]:
    for statement in body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = statement.target, statement.value
        else:
            continue
        names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        if len(names) == 1 and isinstance(names[0], ast.Name):
            numbers = [each for each in map(number, values) if each is not None]
            if len(numbers) == len(values):
                for nth, known in enumerate(numbers):
                    yield f"{names[0].id}[{nth}]" if isinstance(value, ast.Tuple) else names[0].id, known
        elif len(names) == len(values):
            for name, each in zip(names, values, strict=True):
                value_of = number(each)
                if isinstance(name, ast.Name) and value_of is not None:
                    yield name.id, value_of


def found() -> list[str]:
    """A line a constant: file, name, value."""
    lines = []
    for path in sorted((ROOT / "headway").rglob("*.py")):
        place = path.relative_to(ROOT / "headway")
        if place.parts[0] not in APART:
            text = path.read_text(encoding="utf-8")
            for name, value in (*named(text), *assumed(text)):
                if "(" in name or "." not in name or place.parts[0] not in RECORDS_APART:
                    lines.append(f"{place} {name} {value}")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(found()) + "\n")
