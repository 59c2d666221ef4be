"""What the house rules read: every Python file of the checkout, parsed once."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("headway", "tests", "bench", "tools", "examples")
TEXT_SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".html", ".js", ".css", ".json", ".yaml", ".yml", ".sh", ".cfg"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: relative to the checkout, with forward slashes.
        text: its contents.
        tree: its syntax tree; empty for files that are not Python.
    """

    path: str
    text: str
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders and the file name."""
        return tuple(self.path.split("/"))

    @property
    def floor(self) -> str | None:
        """The part of headway the file belongs to, None outside and for headway/__init__.py."""
        return self.parts[1] if self.parts[0] == "headway" and len(self.parts) > 2 else None

    @property
    def lines(self) -> list[str]:
        """The lines of text; line n of the file is lines[n - 1]."""
        return self.text.splitlines()

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


@dataclass(frozen=True, order=True)
class Violation:
    """One broken rule at one place; ``str()`` is what a contributor reads."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def snippet(text: str, path: str = "headway/runner/example.py") -> Source:
    """A source made up by a test."""
    return Source(path, text, ast.parse(text) if path.endswith(".py") else ast.Module([], []))


@cache
def python_sources() -> tuple[Source, ...]:
    """Every Python file of the checkout that is our own."""
    paths = [path for folder in PYTHON_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    gc.disable()  # it would look at two million nodes that stay, again and again: six times as long as parsing takes
    try:
        return tuple(snippet(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()) for path in paths)
    finally:
        gc.freeze()
        gc.enable()


@cache
def text_sources() -> tuple[Source, ...]:
    """Every text file of the checkout that is our own, Python files among them."""
    folders = (*PYTHON_FOLDERS, "docs", ".ci")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    paths += [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    chosen = [path for path in paths if path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run")]
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"), ast.Module([], []))
        for path in chosen
        if path.is_file()
    )


@cache
def protocol_methods() -> frozenset[str]:
    """Names of the methods that a Protocol class of the package documents."""
    return frozenset(
        method.name
        for source in python_sources()
        if source.parts[0] == "headway"
        for owner in ast.walk(source.tree)
        if isinstance(owner, ast.ClassDef) and "Protocol" in {ast.unparse(base).split("[")[0] for base in owner.bases}
        for method in owner.body
        if isinstance(method, Function) and ast.get_docstring(method)
    )


def called_name(call: ast.Call) -> str:
    """The dotted name a call is written with: "torch.load", or ".item" when called on an expression."""
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    elif parts:
        parts.append("")
    return ".".join(reversed(parts))


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, wherever it stands; ``from a import b`` gives both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
