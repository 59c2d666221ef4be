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


SIMULATED = """
import pytest, torch

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
@pytest.mark.no_syncs
def test_free(): (torch.ones(3, device="cuda") * 2).sum()

@pytest.mark.no_syncs
def test_waits(): torch.ones(3, device="cuda").sum().item()

def test_part(forbid_syncs):
    x = torch.ones(3).cuda()
    with forbid_syncs():
        x[x > 0]
"""


def session(folder: Path, tests: str, *options: str) -> str:
    """The output of a pytest session over one file."""
    (folder / "test_it.py").write_text(tests)
    plugin = ["-p", "headway.syncs.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--strict-markers", *plugin, *options, str(folder)]
    # An installed Headway registers the plugin by itself; loading it a second time is an error.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    return done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_simulated_waits_fail_the_tests_that_forbid_them(tmp_path: Path) -> None:
    text = session(tmp_path, SIMULATED, "--syncs-simulate")
    assert "2 failed, 1 passed" in text and "Tensor.item (read)" in text and "Tensor.__getitem__ (size)" in text, text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_a_device_guarded_tests_are_skipped_not_passed(tmp_path: Path) -> None:
    text = session(tmp_path, TESTS)
    assert "2 skipped" in text and "nothing to watch" in text, text
