"""Kernels compile together before their first launch; the checks run in a process without Triton's interpreter."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from headway.kernels.hopper import GLUON_VERSIONS
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
if not version("triton").startswith(GLUON_VERSIONS):
    pytest.skip(f"written for Triton {GLUON_VERSIONS[-1]}*", allow_module_level=True)


def test_noting_and_compiling(tmp_path: Path) -> None:
    checks = run_module("tests.kernels.check_precompile", tmp_path).split()
    assert len(checks) == 15
