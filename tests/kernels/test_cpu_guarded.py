"""The native product reads and writes its arguments and nothing beside them: each lies against a page that nobody may touch.

With all that this CPU has, and with Intel's tiles (AMX) as ``software_tiles.h`` writes them in C, which any x86 runs; there an
operand that nobody has written ends the process, too.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cpu import loader
from headway.kernels.testing import assert_close, make_random

HERE = Path(__file__).parent
SOFTWARE = ["-march=x86-64-v3", "-include", str(HERE / "software_tiles.h"), "-D__AMX_BF16__=1"]
SOFTWARE += ["-ftrivial-auto-var-init=pattern"]
FRESH = {"MALLOC_PERTURB_": "1"}
"""Memory of malloc's comes filled with FE, as the compiler's option fills the stack."""
NAMES = ["native", "tiles"]
SHAPES = [(1, 1, 2), (1, 33, 66), (3, 70, 62), (15, 31, 30), (16, 32, 32), (17, 33, 94), (31, 5, 64)]
SHAPES += [(33, 97, 34), (50, 64, 126), (257, 33, 2082)]  # the last: what tiles take in blocks of rows and inputs
"""Rows, outputs, inputs: fewer than a tile or a panel has, as many, and one more."""


@pytest.fixture(scope="module", params=NAMES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    compiler = shutil.which("gcc")  # its intrinsics for tiles are macros, which software_tiles.h writes anew
    if compiler is None or (request.param == "tiles" and platform.machine() != "x86_64"):
        pytest.skip("needs gcc, for x86-64")
    target = tmp_path_factory.mktemp(request.param) / "guarded_linear"
    sources = [str(loader.source_folder() / name) for name in ("linear.c", "parallel.c")]
    flags = [flag for flag in loader.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    chosen = SOFTWARE if request.param == "tiles" else ["-march=native"]
    command = [compiler, "-O1", *chosen, *flags, *sources, str(HERE / "guarded_linear.c"), "-o", str(target), "-lm"]
    subprocess.run(command, check=True, timeout=300)
    return [str(target)]


@pytest.mark.parametrize("before", [False, True], ids=["page behind", "page before"])
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=["f32", "f32 by bf16", "bf16"],
)
def test_nothing_beside_the_arguments_is_touched(
    program: list[str], dtype: torch.dtype, of_weight: torch.dtype, before: bool, tmp_path: Path
) -> None:
    for rows, outputs, inputs in SHAPES:
        x = make_random(rows, inputs, dtype=dtype, device="cpu")
        weight = (make_random(outputs, inputs, dtype=torch.float32, device="cpu", seed=1) / inputs**0.5).to(of_weight)
        bias = make_random(outputs, dtype=dtype, device="cpu", seed=2)
        source, target = tmp_path / "in", tmp_path / "out"
        source.write_bytes(b"".join(each.view(torch.uint8).numpy().tobytes() for each in (x, weight, bias)))
        numbers = [str(int(each)) for each in (rows, outputs, inputs, dtype is torch.bfloat16)]
        numbers += [str(int(of_weight is torch.bfloat16)), str(int(before))]
        done = subprocess.run(
            [*program, *numbers, str(source), str(target)], env=os.environ | FRESH, check=False, timeout=60
        )
        assert done.returncode == 0, f"{rows} x {outputs} x {inputs} ended by {done.returncode}"
        y = torch.frombuffer(bytearray(target.read_bytes()), dtype=dtype).view(rows, outputs)
        assert_close(y, F.linear(x, weight.to(dtype), bias))
