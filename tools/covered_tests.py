"""Which tests execute which lines: a map that lets a changed line be tried by the tests that can see it.

    PYTHONPATH=FOLDER_OF_COVERAGE python tools/covered_tests.py MAP tests/scheduler tests/runner ...

runs each folder's (or file's) CPU tests under coverage.py, one after the other, adds what they executed to the folder MAP,
and writes MAP/map.json. Processes that tests start count for the test that started them. Triton's kernels are left out, since
they run in an interpreter, and so is ``syncs``. coverage.py is no dependency of Headway: ``pip install --target
FOLDER_OF_COVERAGE coverage``. What no test executes:

    PYTHONPATH=FOLDER_OF_COVERAGE python -m coverage report --rcfile=MAP/coveragerc --show-missing

This file is the pytest plugin that tells coverage.py which test is running, too.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MARKS = "not slow and not soak and not gpu and not attack"
TEST, TIMES = "COVERED_TEST", "COVERED_TIMES"
"""Environment variables: the test that runs, and the file of seconds by test."""
RC = """[run]
parallel = true
sigterm = true
relative_files = true
concurrency = thread, multiprocessing
source = headway
omit = headway/kernels/**/*triton*.py, headway/kernels/**/hopper/*, headway/syncs/*
context = ${COVERED_TEST-}
data_file = {place}/.coverage
"""
START = "import coverage\ncoverage.process_startup()\n"


class CoverageMap:
    """Tests by line, as ``record`` found them in the folder ``place``.

    Attributes:
        seconds: that each test took.
        breadth: lines that each executes: a test of little says more about each line of it.
    """

    def __init__(self, place: Path) -> None:
        data = json.loads((place / "map.json").read_text(encoding="utf-8"))
        self._tests: list[str] = data["tests"]
        self._files: dict[str, dict[str, list[int]]] = data["files"]
        self.seconds: Mapping[str, float] = data["seconds"]
        executed = Counter(test for lines in self._files.values() for tests in lines.values() for test in tests)
        self.breadth: Mapping[str, int] = {self._tests[test]: number for test, number in executed.items()}

    def tests(self, file: str, line: int) -> list[str]:
        """Ids of the tests that pass and execute a line, those first that execute little else. A line that only an import
        executes (a constant, a default) is seen by those that execute any line of its function or class, or else of its
        file."""
        lines = self._files.get(file, {})
        found: set[int] = set()
        for first, last in _around(ROOT / file, line):
            found = {test for number in range(first, last + 1) for test in lines.get(str(number), ())}
            if found:
                break
        passed = (self._tests[test] for test in found if self._tests[test] in self.seconds)
        return sorted(passed, key=lambda name: (self.breadth[name], self.seconds[name]))


def _around(path: Path, line: int) -> Iterator[tuple[int, int]]:
    """First and last lines: the statement's, and those of all that is around it if the statement is not inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    spans = [
        (node.lineno, node.end_lineno or node.lineno, isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    spans.sort(key=lambda span: span[1] - span[0])
    yield line, line
    if spans and not spans[0][2] and spans[0][1] - spans[0][0] < 20:
        yield spans[0][:2]
    in_body = any(function and first < line for first, _, function in spans[1:])
    if not in_body:  # inside a function, a line that ran under no test ran under none
        yield from ((first, last) for first, last, _ in spans[1:])
        yield 1, 1_000_000


def record(place: Path, folders: Sequence[str]) -> None:
    """Run the tests of ``folders`` and add what they execute to the map in ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    rc, times = place / "coveragerc", place / "seconds.json"
    rc.write_text(RC.replace("{place}", str(place)), encoding="utf-8")
    (place / "sitecustomize.py").write_text(START, encoding="utf-8")
    path = os.pathsep.join([str(place), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "COVERAGE_PROCESS_START": str(rc), TIMES: str(times)}
    environment |= {"OMP_NUM_THREADS": "1"}
    pytest_run = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.covered_tests", "-m", MARKS]
    for folder in folders:
        print(folder, flush=True)
        # Started by sitecustomize, as its children are: `coverage run` would start it twice.
        subprocess.run([sys.executable, "-m", *pytest_run, folder], cwd=ROOT, env=environment, check=False)
        _combine(place, rc)


def _combine(place: Path, rc: Path) -> None:
    """Merge what the processes have written, and write the map."""
    coverage: Any = importlib.import_module("coverage")
    os.environ.pop(TEST, None)
    whole = coverage.Coverage(config_file=str(rc))
    whole.load()  # what earlier runs found stays
    whole.combine([str(place)], strict=False, keep=False)
    whole.save()
    data = whole.get_data()
    tests: dict[str, int] = {}
    files: dict[str, dict[int, list[int]]] = {}
    for file in sorted(data.measured_files()):
        by_line = data.contexts_by_lineno(file)
        files[file] = {
            line: sorted({tests.setdefault(name, len(tests)) for name in names if name})
            for line, names in by_line.items()
            if line > 0
        }
    times = place / "seconds.json"
    seconds = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    written = {"tests": [*tests], "files": files, "seconds": seconds}
    (place / "map.json").write_text(json.dumps(written), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of pytest."""
    config.pluginmanager.register(Recorder(), "recorder")


class Recorder:
    """Tells coverage.py, and the processes that a test starts, which test runs; notes how long each takes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What fails without a fault says nothing about one."""
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Around one test, its fixtures included."""
        coverage: Any = importlib.import_module("coverage")
        measured = coverage.Coverage.current()
        assert measured is not None, "run tools/covered_tests.py"
        measured.switch_context(item.nodeid)
        os.environ[TEST] = item.nodeid
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            if item.nodeid not in self._failed:
                self._seconds[item.nodeid] = round(time.perf_counter() - begun, 4)
            del os.environ[TEST]
            measured.switch_context("")

    def pytest_sessionfinish(self) -> None:
        """Add the seconds of this run's tests to the others'."""
        times = Path(os.environ[TIMES])
        known = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
        times.write_text(json.dumps(known | self._seconds), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Record which tests execute which lines.")
    parser.add_argument("map", type=Path, help="a folder")
    parser.add_argument("folders", nargs="+", help="of tests, or files")
    options = parser.parse_args(arguments)
    record(options.map.resolve(), options.folders)


if __name__ == "__main__":
    main()
