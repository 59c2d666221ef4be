"""The checkout obeys the house rules."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.source import ROOT, python_sources, text_sources

MAX_PACKAGE_LINES = 40_500


@pytest.mark.parametrize("rule", rules.PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_files_obey(rule: rules.Rule) -> None:
    violations = [violation for source in python_sources() for violation in rule(source)]
    assert not violations, "\n" + "\n".join(map(str, sorted(violations)))


@pytest.mark.parametrize("rule", rules.TEXT_RULES, ids=lambda rule: rule.__name__)
def test_text_files_obey(rule: rules.Rule) -> None:
    violations = [violation for source in text_sources() for violation in rule(source)]
    assert not violations, "\n" + "\n".join(map(str, sorted(violations)))


def test_the_package_keeps_its_size_budget() -> None:
    lines = sum(len(source.lines) for source in python_sources() if source.parts[0] == "headway")
    assert lines <= MAX_PACKAGE_LINES, f"headway/ has {lines} lines of Python; the budget is {MAX_PACKAGE_LINES}"


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
