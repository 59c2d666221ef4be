"""The forward kernels compile for Hopper with the table's tiles: matrix units, asynchronous copies, no spills."""

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

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize(("which", "number"), [("main", 68), pytest.param("others", 44, marks=pytest.mark.soak)])
def test_kernels_compile_for_sm_90(which: str, number: int, tmp_path: Path) -> None:
    kernels = [json.loads(line) for line in run_module("tests.kernels.compile_forward", tmp_path, which).splitlines()]
    assert len(kernels) == number
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT, kernel
        full = (
            "D=256" in kernel["name"] and "width=1 " not in kernel["name"]
        )  # sums and keys of drafts fill all registers
        few = 26 if "stored=True" in kernel["name"] else 8  # of 4 queries a KV head; a layer's own keys spill 32 there
        few, full = (
            (200, True) if kernel["name"].startswith("latents") else (few, full)
        )  # numbers of a unit and of its pages
        assert kernel["spilled"] <= few * full and not kernel["serialized"], kernel
        if kernel["name"].startswith(("prefill", "wide", "thin", "latents")):
            assert kernel["warpgroup_products"] and kernel["async_copies"], kernel
        if kernel["name"].startswith("prefill overlapped"):
            assert kernel["beside_products"] >= 32, kernel  # the assembler likes to wait for products before it folds
        if kernel["name"].startswith("linear dot"):
            assert kernel["warp_products"] or kernel["warpgroup_products"], kernel
        if kernel["name"].startswith("mid"):
            held = int(kernel["name"].split()[-1])  # all the weights that the tile holds ahead
            assert kernel["warpgroup_products"] and kernel["copies_before_wait"] == held > 0, kernel
        if kernel["name"].startswith("early decode"):
            copies = int(kernel["name"].split()[-1])  # all tiles that shared memory holds
            assert kernel["warp_products"] and kernel["copies_before_wait"] == copies, kernel
        if kernel["name"].startswith("decode"):
            assert kernel["warp_products"] and kernel["async_copies"], kernel
