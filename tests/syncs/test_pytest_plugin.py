"""The plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.house.source import ROOT

TESTS = """
import pytest

@pytest.mark.no_syncs
def test_marked(): ...

def test_fixture(forbid_syncs):
    with forbid_syncs(): ...
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_a_device_guarded_tests_are_skipped_not_passed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "--strict-markers",
        "-p",
        "headway.syncs.pytest_plugin",
        str(tmp_path),
    ]
    # An installed Headway registers the plugin by itself; loading it a second time is an error.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert "2 skipped" in done.stdout and "nothing to watch" in done.stdout, done.stdout
