"""A first pass without running anything: lines whose idiom waits for the GPU if its tensor is there. It cannot know that.

    headway syncs --lint train.py package/

Only what is plain in the source is said: the calls that read (item, tolist, cpu), sizes that depend on values, tensors built on
the device from lists, uploads that block, checks of distributions. What a run finds (without --lint) is the truth.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headway.syncs.fixes import fix_for
from headway.syncs.places import short

READS: Final = frozenset({"item", "tolist", "cpu"})
SIZES: Final = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"})
UNLESS: Final = {"one_hot": ("num_classes", 1), "repeat_interleave": ("output_size", 9), "histc": ("max", 3)}
"""Functions of torch that wait unless they are given this argument, by name or at this place."""
WAITS: Final = {"synchronize": "device", "empty_cache": "memory"}
DISTRIBUTIONS: Final = frozenset([
    "Normal", "Categorical", "Bernoulli", "Beta", "Gamma", "Exponential", "Uniform", "Laplace", "Dirichlet", "Poisson",
    "MultivariateNormal", "Binomial",
])  # fmt: skip
_COMPARES: Final = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq)


@dataclasses.dataclass(frozen=True)
class Hint:
    """One line that may wait.

    Attributes:
        looped: whether it is inside a loop.
    """

    file: str
    line: int
    kind: str
    call: str
    within: str
    source: str
    looped: bool

    def __str__(self) -> str:
        fix = fix_for(self.kind, self.call, self.within, self.source)
        loop = ", in a loop" if self.looped else ""
        return f"{self.file}:{self.line}: {self.call} may wait ({self.kind}{loop}): {fix.name}. {fix.advice}"


def check(source: str, file: str = "<string>") -> list[Hint]:
    """The hints for one file's text, by line.

    Raises:
        SyntaxError: not Python of this version.
    """
    tree = ast.parse(source, file)
    lines = source.splitlines()
    if not any(_imports_torch(node) for node in ast.walk(tree)):
        return []
    found = []
    for node, looped in _walk(tree, False):
        for kind, call, within in _waits(node):
            text = lines[node.lineno - 1].strip()
            found.append(Hint(file, node.lineno, kind, call, within, text, looped))
    return sorted(set(found), key=lambda hint: (hint.line, hint.call))


def check_paths(paths: list[Path]) -> tuple[list[Hint], list[str]]:
    """The hints for files and folders, those in loops first; and what could not be read."""
    hints: list[Hint] = []
    problems = []
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files or not path.exists():
            problems.append(f"{path}: no Python file")
            continue
        for file in files:
            try:
                hints += check(file.read_text(encoding="utf-8"), short(str(file)))
            except (OSError, SyntaxError, UnicodeDecodeError) as error:
                problems.append(f"{file}: {error}")
    return sorted(hints, key=lambda hint: not hint.looped), problems


def _imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.partition(".")[0] == "torch" for name in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"


def _walk(node: ast.AST, looped: bool) -> Iterator[tuple[ast.expr, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child, looped
        inside = looped or isinstance(child, (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.GeneratorExp))
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = False
        yield from _walk(child, inside)


def _waits(node: ast.expr) -> Iterator[tuple[str, str, str]]:
    """(kind, call, part of torch) of what an expression does by itself."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Compare) and isinstance(node.ctx, ast.Load):
        numbers = isinstance(node.slice.left, (ast.Subscript, ast.Name, ast.Call)) and not _is_dict_like(node)
        if numbers and isinstance(node.slice.ops[0], _COMPARES):
            yield "size", "Tensor.__getitem__", ""
    if not isinstance(node, ast.Call):
        return
    name = _name(node.func)
    short_name = name.rpartition(".")[2]
    named = {word.arg for word in node.keywords}
    of_torch = name.startswith(("torch.", "F.", "nn.functional."))
    if isinstance(node.func, ast.Attribute) and short_name in READS and not node.args and not named:
        yield "read", f"Tensor.{short_name}", ""
    elif short_name in SIZES and (of_torch or (isinstance(node.func, ast.Attribute) and not _is_numpy(name))):
        yield "size", f"torch.{short_name}", ""
    elif short_name in UNLESS and (of_torch or short_name == "one_hot"):
        argument, place = UNLESS[short_name]
        if argument not in named and len(node.args) <= place:
            yield ("read" if short_name != "repeat_interleave" else "size"), f"torch.{short_name}", ""
    elif name in ("torch.tensor", "torch.as_tensor") and "device" in named and node.args and _device(node) != "cpu":
        yield "upload", name, ""
    elif short_name == "where" and name == "torch.where" and len(node.args) == 1 and not named:
        yield "size", name, ""
    elif name in ("torch.equal", "torch.allclose"):
        yield "read", name, ""
    elif name.startswith(("torch.cuda.", "torch.accelerator.")) and short_name in WAITS:
        yield WAITS[short_name], name, ""
    elif short_name in ("cuda", "to") and isinstance(node.func, ast.Attribute) and "non_blocking" not in named:
        if (short_name == "cuda" and not node.args) or (short_name == "to" and _device(node) == "cuda"):
            yield "upload", f"Tensor.{short_name}", ""
    elif short_name in DISTRIBUTIONS and "validate_args" not in named and node.args and "np." not in name:
        yield "read", name, f"distributions.{short_name}"
    elif name.startswith("torch.linalg.") and short_name in ("inv", "cholesky", "solve"):
        yield "read", name, ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_numpy(name: str) -> bool:
    return name.partition(".")[0] in ("np", "numpy", "pd", "pandas")


def _is_dict_like(node: ast.Subscript) -> bool:
    return isinstance(node.value, (ast.Dict, ast.Constant)) or _is_numpy(_name(node.value))


def _device(node: ast.Call) -> str:
    """The type of device that a call names in plain letters; empty where it does not."""
    values = [word.value for word in node.keywords if word.arg == "device"] or node.args[:1]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value.partition(":")[0]
    return ""
