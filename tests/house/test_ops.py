"""Every operation has a schema, a reference, fast implementations of the same signature, and tests."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.kernels.registry import OPS, Op
from tests.house.source import ROOT

KERNELS = ROOT / "headway" / "kernels"
NOT_OPS = {"cpu", "linear_forms", "__pycache__"}  # C sources that implement several operations; which of them runs
FOLDERS = sorted(path.name for path in KERNELS.iterdir() if path.is_dir() and path.name not in NOT_OPS)


def ops_of(folder: str) -> list[Op]:
    """The operations that headway/kernels/<folder> registers."""
    module = importlib.import_module(f"headway.kernels.{folder}")
    return [value for value in vars(module).values() if isinstance(value, Op)]


def schema_arguments(schema: str) -> list[str]:
    """The argument names of a torch schema, in order."""
    return [argument.name for argument in torch._C.parse_schema(f"headway::{schema}").arguments]


def defined_arguments(path: str, root: Path = ROOT) -> list[str]:
    """The argument names of "module:function", read from its source so that nothing need be installed to look; "*" stands for
    those that it hands on."""
    module, _, name = path.partition(":")
    file = root / (module.replace(".", "/") + ".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            named = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            return named if node.args.vararg is None else [*named, "*"]
    raise AssertionError(f"{file.relative_to(root)} defines no function {name}")


def function_arguments(function: Callable[..., Any]) -> list[str]:
    """As ``defined_arguments``."""
    parameters = inspect.signature(function).parameters.values()
    return ["*" if each.kind is inspect.Parameter.VAR_POSITIONAL else each.name for each in parameters]


def mismatch(op: str, what: str, expected: Sequence[str], found: Sequence[str]) -> str | None:
    """What to tell the author when an implementation's arguments are not the schema's, None when they are. It may name the
    first ones and hand on the others, ``*rest``."""
    named = list(found[:-1]) if found and found[-1] == "*" else list(found)
    if list(expected) == named or (len(named) < len(found) and list(expected[: len(named)]) == named):
        return None
    return f"{op}: the schema has ({', '.join(expected)}) but its {what} has ({', '.join(found)})"


def op_problems(op: Op, folder: str) -> list[str]:
    """Everything wrong with one operation's registration."""
    expected = schema_arguments(op.schema)
    problems = [mismatch(op.name, "reference", expected, function_arguments(op.reference))]
    if not op.reference.__module__.startswith(f"headway.kernels.{folder}.reference"):
        problems.append(f"{op.name}: its reference lives in {op.reference.__module__}, not in {folder}/reference.py")
    meta = list(inspect.signature(op.meta).parameters.values())
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in meta)
    if not takes_any and len(meta) != len(expected):
        problems.append(f"{op.name}: the schema has {len(expected)} arguments but its meta has {len(meta)}")
    for what, path in (("triton", op.triton), ("cpu", op.cpu)):
        if path is not None:
            problems.append(mismatch(op.name, what, expected, defined_arguments(path)))
    return [problem for problem in problems if problem]


def test_the_walk_sees_the_operations() -> None:
    for folder in FOLDERS:
        importlib.import_module(f"headway.kernels.{folder}")
    assert len(FOLDERS) >= 10
    assert {op.name for folder in FOLDERS for op in ops_of(folder)} == set(OPS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_an_operation(folder: str) -> None:
    assert (KERNELS / folder / "reference.py").is_file()
    ops = ops_of(folder)
    assert ops, f"headway/kernels/{folder}/__init__.py registers no Op"
    assert importlib.import_module(f"headway.kernels.{folder}").__doc__, "the shape doc is the package's docstring"
    problems = [problem for op in ops for problem in op_problems(op, folder)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_tests(folder: str) -> None:
    tests = ROOT / "tests" / "kernels"
    assert list(tests.glob(f"test_{folder}*.py")), f"no tests/kernels/test_{folder}.py"


def test_importing_operations_imports_no_triton() -> None:
    code = "import sys, importlib\n"
    code += f"for name in {FOLDERS!r}: importlib.import_module('headway.kernels.' + name)\n"
    code += "sys.exit('triton' in sys.modules)"
    # torch itself may import triton only when it compiles; on its own import it does not.
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_wrong_signature_is_reported() -> None:
    assert mismatch("f", "reference", ["x", "eps"], ["x", "eps"]) is None
    assert mismatch("f", "reference", ["x", "eps"], ["eps", "x"])
    assert mismatch("f", "reference", ["x", "eps"], ["x"])
    assert mismatch("f", "reference", ["x", "eps", "cap"], ["x", "*"]) is None
    assert mismatch("f", "reference", ["x", "eps", "cap"], ["eps", "*"])
    assert mismatch("f", "reference", ["x"], ["x", "eps", "*"])


def test_schema_arguments_reads_mutations_and_defaults() -> None:
    assert schema_arguments("f(Tensor x, Tensor(a!) out, Tensor? w, float eps) -> ()") == ["x", "out", "w", "eps"]


def test_a_missing_implementation_is_reported(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text("def run(x, eps):\n    pass\n\n\ndef hand(x, *rest):\n    pass\n")
    assert defined_arguments("op:run", tmp_path) == ["x", "eps"]
    assert defined_arguments("op:hand", tmp_path) == ["x", "*"]
    with pytest.raises(AssertionError, match="no function walk"):
        defined_arguments("op:walk", tmp_path)
