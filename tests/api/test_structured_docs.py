"""The example of docs/structured_output.md runs as it stands there."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"


def test_the_example_prints_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1], encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))
    person = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(person["name"], str) and 0 <= person["age"] <= 150
