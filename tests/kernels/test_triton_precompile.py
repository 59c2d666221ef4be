"""Kernels compile together before their first launch; the checks run in a process without Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")


def test_noting_and_compiling(tmp_path: Path) -> None:
    checks = run_module("tests.kernels.check_precompile", tmp_path).split()
    assert len(checks) == 12
