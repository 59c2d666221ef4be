"""The experts' products compile for Hopper: grouped ones with warpgroup products and asynchronous copies, those of few tokens
in 4 bits with products of a warp; no spills, nothing that waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from headway.kernels.hopper import GLUON_VERSIONS
from tests.kernels.test_forward_compiles import SHARED_LIMIT

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
if not version("triton").startswith(GLUON_VERSIONS):
    pytest.skip(f"written for Triton {GLUON_VERSIONS[-1]}*", allow_module_level=True)


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(here.parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, str(here.with_name("compile_experts.py"))]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 14
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT and kernel["spilled"] == 0 and not kernel["serialized"], kernel
        grouped = not kernel["name"].startswith("few")
        assert bool(kernel["warpgroup_products"]) == bool(kernel["async_copies"]) == grouped, kernel
        assert bool(kernel["warp_products"]) != grouped, kernel
