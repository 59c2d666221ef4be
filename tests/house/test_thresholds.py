"""docs/thresholds.md names what there is: constants and fields that stand in their files, tests that mention them."""

from __future__ import annotations

import re

import pytest

from tests.house.source import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "thresholds.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_names_and_tests_exist(row: list[str]) -> None:
    [file], names, _, tests = quoted(row[0]), quoted(row[1]), row[2], quoted(row[3])
    text = (ROOT / "headway" / file).read_text(encoding="utf-8")
    missing = [
        name for name in names if not re.search(rf"^\s*([A-Z_]+, )*{name}(, [A-Z_]+)*\s*(:|=)", text, re.MULTILINE)
    ]
    assert names and not missing, f"{file} has no {missing}"
    assert tests and all((ROOT / test).exists() for test in tests)
