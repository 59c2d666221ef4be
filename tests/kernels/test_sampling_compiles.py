"""The sampling kernels compile for Hopper: no spills, wide loads, little shared memory."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from headway.kernels.hopper import GLUON_VERSIONS
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
if not version("triton").startswith(GLUON_VERSIONS):
    pytest.skip(f"written for Triton {GLUON_VERSIONS[-1]}*", allow_module_level=True)


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    lines = run_module("tests.kernels.compile_sampling", tmp_path).splitlines()
    kernels = [json.loads(line) for line in lines]
    assert len(kernels) == 49
    for kernel in kernels:
        assert kernel["shared"] <= 48 * 1024 and kernel["spilled"] == 0, kernel
        if kernel["name"].startswith("race") and "V=112" not in kernel["name"]:
            assert kernel["wide_loads"], kernel
