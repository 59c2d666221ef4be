"""Runs test modules that need Triton's compiler in processes of their own: the tests' has Triton's interpreter switched on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = "import gc, runpy, sys; gc.disable(); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
"""Few of the many objects of a compiler are garbage: looking for it takes a tenth of the time."""


def run_module(name: str, cache: Path, *arguments: str) -> str:
    """What ``python -m name`` prints, with Triton's cache in the folder ``cache``; fails with what it complains of."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-c", RUN, name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
