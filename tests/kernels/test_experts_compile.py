"""The experts' products compile for Hopper: grouped ones with warpgroup products and asynchronous copies, those of few tokens
in 4 bits with products of a warp; no spills, nothing that waits."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from headway.kernels.hopper import GLUON_VERSIONS
from tests.kernels.compiler_process import run_module
from tests.kernels.test_forward_compiles import SHARED_LIMIT

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
if not version("triton").startswith(GLUON_VERSIONS):
    pytest.skip(f"written for Triton {GLUON_VERSIONS[-1]}*", allow_module_level=True)


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    kernels = [json.loads(line) for line in run_module("tests.kernels.compile_experts", tmp_path).splitlines()]
    assert len(kernels) == 16
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT and kernel["spilled"] == 0 and not kernel["serialized"], kernel
        grouped = not kernel["name"].startswith("few")
        assert bool(kernel["warpgroup_products"]) == bool(kernel["async_copies"]) == grouped, kernel
        assert bool(kernel["warp_products"]) != grouped, kernel
