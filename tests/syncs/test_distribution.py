"""``headway-syncs``, the distribution built from this tree: it needs torch alone, and carries what it reads."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.house.source import ROOT

FOLDER = ROOT / "packaging" / "syncs"
OPTIONAL = {"cupti", "pytest", "numpy"}  # numpy where a program's Triton kernels run: Triton's interpreter needs it
"""Imported where they are asked for: at the driver boundary, and by the plugin that pytest itself loads."""


def test_it_imports_torch_and_nothing_else() -> None:
    found: set[str] = set()
    for path in (ROOT / "headway" / "syncs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    outside = {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in outside} - OPTIONAL == {"torch", "headway"}
    assert all(name.startswith("headway.syncs") for name in outside if name.startswith("headway"))


def test_numpy_is_not_needed_before_a_program_imports_triton() -> None:
    code = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")
import torch
from headway import syncs
from headway.syncs.simulate import SimulationProbe
with syncs.record(probes=(SimulationProbe(),)) as log:
    assert float(torch.ones(2, device="cuda").sum()) == 2
assert len(log.findings) == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_its_project_file_points_into_this_tree() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [line.partition(">")[0] for line in project["project"]["dependencies"]] == ["torch"]
    assert project["project"]["dependencies"][0] in whole["project"]["dependencies"]
    (source,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert (FOLDER / source).resolve() == ROOT / "headway" / "syncs"
    assert (FOLDER / project["tool"]["hatch"]["version"]["path"]).is_file()
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("![") and (FOLDER / "finding.svg").is_file()
    assert Path(ROOT / "headway/syncs/sim/waits.json").is_file()
