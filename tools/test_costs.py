"""Processor time that tests take, by folder and file, whatever else the machine does meanwhile.

    python -m pytest -p tools.test_costs -m "not gpu and not soak" -n 2 --dist loadfile tests/kernels

Processes that a test starts count when they have ended; importing and collecting count as such, once for each process of tests.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import Any

import pytest

SHOWN = 30
"""Files that are listed."""


class Costs:
    """Seconds by file, in this process and, where this one only shares them out, in those of the tests."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = spent()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid.partition("::")[0]] += spent() - before

    def pytest_collection_finish(self) -> None:
        self.seconds["collecting"] += spent()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, seconds in node.workeroutput.get("costs", {}).items():
            self.seconds[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders = defaultdict[str, float](float)
        for file, seconds in self.seconds.items():
            folders["/".join(file.split("/")[:2])] += seconds
        terminalreporter.section(f"{sum(folders.values()):.0f} s of processor time")
        for name, seconds in [*ranked(folders), *ranked(self.seconds)[:SHOWN]]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")


def ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The most first."""
    return sorted(seconds.items(), key=lambda each: -each[1])


def spent() -> float:
    """Seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
