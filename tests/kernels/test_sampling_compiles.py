"""The sampling kernels compile for Hopper: no spills, wide loads, little shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(here.parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, str(here.with_name("compile_sampling.py"))]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 42
    for kernel in kernels:
        assert kernel["shared"] <= 48 * 1024 and kernel["spilled"] == 0, kernel
        if kernel["name"].startswith("race") and "V=112" not in kernel["name"]:
            assert kernel["wide_loads"], kernel
