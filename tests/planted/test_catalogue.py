"""Every fault of the catalogue still fits the file it is meant for."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def tool() -> Any:
    """tools/planted_faults.py, which is a script and no module of a package."""
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "tools" / "planted_faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


FAULTS, CHECKS = tool().load()


def test_there_are_faults_with_distinct_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 40 and CHECKS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_line_and_leaves_python(fault: Any) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.planted(text)
    assert planted != text
    ast.parse(planted)
