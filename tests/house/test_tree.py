"""The checkout obeys the house rules."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.source import ROOT, python_sources, text_sources

BUDGET = {
    "cli": 6_110, "server": 7_482, "api": 10_609, "engine": 5_198, "runner": 3_050, "speculative": 1_863, "multimodal": 1_197,
    "models": 17_044, "attention": 805, "recurrent": 227, "sampling": 859, "pooling": 260, "state": 886, "parallel": 2_124,
    "scheduler": 2_985, "device": 3_079, "kernels": 28_391, "weights": 1_705, "core": 2_856,
}  # fmt: skip
"""Lines of Python that each floor may have once all fifteen systems of the design stand. To move lines between floors,
change both numbers in the commit that needs it, and say why there. ``syncs`` is a distribution of its own."""
WHOLE_BUDGET = 96_730


@pytest.mark.parametrize("rule", rules.PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_files_obey(rule: rules.Rule) -> None:
    violations = [violation for source in python_sources() for violation in rule(source)]
    assert not violations, "\n" + "\n".join(map(str, sorted(violations)))


@pytest.mark.parametrize("rule", rules.TEXT_RULES, ids=lambda rule: rule.__name__)
def test_text_files_obey(rule: rules.Rule) -> None:
    violations = [violation for source in text_sources() for violation in rule(source)]
    assert not violations, "\n" + "\n".join(map(str, sorted(violations)))


@pytest.mark.parametrize("floor", BUDGET)
def test_each_floor_keeps_its_budget_of_lines(floor: str) -> None:
    lines = sum(len(source.lines) for source in python_sources() if source.floor == floor)
    assert lines <= BUDGET[floor], f"headway/{floor} has {lines} lines of Python; its budget is {BUDGET[floor]}"


def test_the_budget_is_whole() -> None:
    assert sum(BUDGET.values()) <= WHOLE_BUDGET
    floors = {source.floor for source in python_sources() if source.parts[0] == "headway"}
    assert floors - {None, "syncs"} <= set(BUDGET)


def test_every_part_is_a_package() -> None:
    """Without its __init__.py a folder imports all the same, but neither the floors' check nor mypy sees it."""
    folders = {(ROOT / source.path).parent for source in python_sources() if source.parts[0] == "headway"}
    missing = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not missing, f"no __init__.py in {', '.join(sorted(missing))}"


def test_the_walk_sees_the_tree() -> None:
    """An empty walk would obey every rule."""
    paths = {source.path for source in python_sources()}
    assert {"headway/core/plan.py", "headway/kernels/registry.py", "tests/house/test_tree.py"} <= paths
    assert {"pyproject.toml", "CONTRIBUTING.md", ".ci/run", "docs/dependencies.md"} <= {s.path for s in text_sources()}
