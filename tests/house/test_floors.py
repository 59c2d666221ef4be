"""The contracts in pyproject.toml forbid what they are meant to: each fault is planted in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

RUN = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_with(folder: Path, module: str, line: str) -> subprocess.CompletedProcess[str]:
    """Check a copy of headway/ in which headway/``module`` has one line more."""
    shutil.copytree(ROOT / "headway", folder / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    target = folder / "headway" / module
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    return subprocess.run([sys.executable, "-c", RUN], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/ints.py", "import headway.state.batch"),  # upward
        ("core/ints.py", "def f():\n    import torch"),  # even where it is late
        ("scheduler/__init__.py", "import torch"),
        ("state/batch.py", "import headway.sampling"),  # upward
        ("sampling/__init__.py", "import headway.attention"),  # sideways
        ("scheduler/__init__.py", "import headway.device.base"),  # sideways
        ("misc/__init__.py", "import json"),  # a part on no floor
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, module: str, line: str) -> None:
    result = lint_with(tmp_path, module, line)
    assert result.returncode != 0, result.stdout


def test_a_downward_import_is_allowed(tmp_path: Path) -> None:
    result = lint_with(tmp_path, "state/batch.py", "import headway.core.ints")
    assert result.returncode == 0, result.stdout + result.stderr
