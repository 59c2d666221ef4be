"""Kernels compile together before their first launch; the checks run in a process without Triton's interpreter."""

from __future__ import annotations

import threading
from importlib.metadata import version
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.jit import JITFunction

from headway.kernels.hopper import GLUON_VERSIONS
from headway.kernels.triton_precompile import launches_noted, misses_raised
from tests.kernels.compiler_process import run_module

pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
if not version("triton").startswith(GLUON_VERSIONS):
    pytest.skip(f"written for Triton {GLUON_VERSIONS[-1]}*", allow_module_level=True)


def test_noting_and_compiling(tmp_path: Path) -> None:
    checks = run_module("tests.kernels.check_precompile", tmp_path).split()
    assert len(checks) == 15


def test_triton_is_put_back_whatever_happens() -> None:
    def own() -> list[object]:
        return [JITFunction.run, knobs.runtime.jit_cache_hook, knobs.cache.manager_class]

    before = own()
    for inside, changes in ((launches_noted(print), (0, 1)), (misses_raised(threading.local()), (2,))):
        with pytest.raises(KeyError), inside:
            assert [n for n, each in enumerate(own()) if each is not before[n]] == [*changes]
            raise KeyError
        assert all(one is other for one, other in zip(own(), before, strict=True))
