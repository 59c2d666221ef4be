"""Which tests concern a change of a file: those of its floor, and those that name its module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

PYTEST = ("pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", "-m", "not slow and not soak and not gpu")
_SAMPLING = ("tests/engine/test_sampling_oracle.py", "tests/sim/test_sampling_oracle.py", "tests/sim/test_costs.py")
_DOOR = tuple(f"tests/api/test_{name}.py" for name in ("limits", "inputs", "async_llm", "stop_edges"))
_ENGINE = ("tests/engine/test_naive.py", "tests/engine/test_depths.py", "tests/engine")
FOLDERS: Mapping[str, Sequence[Sequence[str]]] = {
    "core": [("tests/core",), (*_DOOR, "tests/api"), ("tests/scheduler", "tests/state"), _SAMPLING[:1], ("tests/server",),
             _ENGINE],
    "scheduler": [("tests/scheduler",), ("tests/sim/test_costs.py",), _ENGINE, ("tests/sim",)],
    "device": [("tests/device",), ("tests/sim/test_costs.py", "tests/sim"), ("tests/engine/test_metrics.py",)],
    "weights": [("tests/weights",), ("tests/models",)],
    "kernels": [_SAMPLING, ("tests/kernels/test_bit_equality.py", "tests/kernels"), ("tests/sim",)],
    "state": [("tests/state",), _SAMPLING, _ENGINE],
    "sampling": [_SAMPLING, _ENGINE, ("tests/sim",)],
    "models": [("tests/models",), ("tests/attention", "tests/recurrent", "tests/latent", "tests/multimodal"), _ENGINE],
    "runner": [("tests/runner",), _SAMPLING, _ENGINE, ("tests/sim",)],
    "engine": [_ENGINE, ("tests/sim/test_costs.py", "tests/sim"), ("tests/api",)],
    "api": [(*_DOOR, "tests/api"), _SAMPLING[:1], ("tests/server",), ("tests/multimodal",)],
    "server": [("tests/server/test_door.py", "tests/server/test_chat.py", "tests/server"), ("tests/cli",)],
    "cli": [("tests/cli",)],
    "syncs": [("tests/syncs",)],
}  # fmt: skip
"""The tests that a change on a floor concerns, in groups, those first that are likely to tell soonest."""


def folders(file: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The whole test folders that a change of ``file``, below the root, concerns, as checks."""
    parts = Path(file).parts
    others = [(f"tests/{parts[1]}",), _SAMPLING, _ENGINE, ("tests/sim",)]
    for group in FOLDERS.get(parts[1], others) if parts[0] == "headway" else ():
        found = [part for part in group if (ROOT / part).exists()]
        if found:
            yield found[-1], (*PYTEST, *_files(found))


def _files(parts: Sequence[str]) -> list[str]:
    """The test files of ``parts``, in that order: pytest leaves out a file that lies in a folder it is given as well."""
    found = dict[str, None]()
    for part in parts:
        place = ROOT / part
        tests = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
        found |= dict.fromkeys(str(test.relative_to(ROOT)) for test in tests)
    return list(found)


def nearest(file: str, seconds: float) -> tuple[str, Sequence[str]]:
    """One check of all that a change of ``file`` concerns, for so many seconds: first the test files that name the module or
    are named like it, then the folders, then every other test file from which imports lead there, the fewest first."""
    parts = Path(file).with_suffix("").parts
    module, stem = ".".join(parts), parts[-1] if parts[-1] not in _GENERAL else parts[-2]
    package = module.rpartition(".")[0]
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{parts[-1]}\b")
    groups = [part for _, check in folders(file) for part in check[len(PYTEST) :]]
    ranked: list[tuple[int, str]] = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        place, elsewhere = str(test.relative_to(ROOT)), parts[1] not in test.parts
        is_named, uses = re.search(rf"(^|_){stem}(_|$)", test.stem), imports.search(test.read_text("utf-8"))
        rank = 2 * (is_named is None) + (uses is None)
        if rank < 3 and not place.startswith(APART):
            ranked.append((rank + 3 * elsewhere, place))
    if sum(rank == 5 for rank, _ in ranked) > MOST_ELSEWHERE:  # everybody's module: its folders are likelier to tell
        ranked = [each for each in ranked if each[0] < 5]
    found = dict.fromkeys([*(place for _, place in sorted(ranked)), *groups, *by_imports(file)])
    return f"near {stem}", (*PYTEST, f"--session-timeout={seconds:g}", *found)


def by_imports(file: str) -> list[str]:
    """The test files from which imports, of helpers among the tests as well, lead to ``file``: those of few steps first."""
    reached, edge, steps = {file: 0}, {file}, 0
    importers: dict[str, set[str]] = {}
    for importer, modules in _imports().items():
        for module in modules:
            importers.setdefault(module, set()).add(importer)
    while edge:
        steps += 1
        edge = {each for module in edge for each in importers.get(module, ())} - reached.keys()
        reached |= dict.fromkeys(edge, steps)
    tests = [each for each in reached if each.startswith("tests/") and "/test_" in each]
    return sorted((each for each in tests if not each.startswith(APART)), key=lambda each: (reached[each], each))


@cache
def _imports() -> Mapping[str, frozenset[str]]:
    """What each file of the package and of the tests imports, inside functions as well; an import of a package is one of its
    ``__init__.py``."""
    paths = [path for top in ("headway", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    places = {name: str(path.relative_to(ROOT)) for name, path in files.items()}
    return {places[name]: frozenset(_imported(path, places)) for name, path in files.items()}


def _imported(path: Path, places: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [
                f"{node.module}.{name}" if f"{node.module}.{name}" in places else str(node.module) for name in names
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("headway."):
            names = [
                node.value.partition(":")[0]
            ]  # registries say where a thing is, and import it when it is asked for
        yield from (places[name] for name in names if name in places)


APART = ("tests/planted", "tests/house", "tests/gpu")
"""Tests of the tests, and those that need a card."""
_GENERAL = ("reference", "triton", "launch", "cpu", "base", "__init__")
"""Names of modules that say nothing: their package's counts."""
MOST_ELSEWHERE = 6
"""Test files of other floors that import a module and come before its own folders."""
