"""Triton kernels of a program under the simulation, launched as they would be on a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
]

KERNELS = """
import torch, triton, triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def doubled(x):
    return x * 2

@triton.jit
def mixed(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at, mask=at < n, other=0.0), tl.load(y + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.where(a > b, doubled(a) + 1.5, tl.maximum(a, b) - b * a), mask=at < n)

@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    e = tl.exp(tl.load(x + at, mask=inside, other=-float("inf")))
    tl.store(out + at, e / tl.sum(e, axis=0), mask=inside)

@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["K"])
@triton.jit
def product(a, b, out, K, B: tl.constexpr):
    m, n, total = tl.arange(0, 16), tl.arange(0, 16), tl.zeros((16, 16), dtype=tl.float32)
    for part in range(0, tl.cdiv(K, B)):
        k = part * B + tl.arange(0, B)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        right = tl.load(b + k[:, None] * 16 + n[None, :], mask=k[:, None] < K, other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + m[:, None] * 16 + n[None, :], total.to(out.dtype.element_ty))

@triton.jit
def squashed(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, libdevice.tanh(tl.load(x + at)))

@triton.jit
def numbered(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, (at.to(tl.bfloat16) + tl.load(x + at)).to(tl.int32))

@triton.jit
def assembled(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + at)], tl.float32, True, 1))

@triton.jit
def looked_up(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, libdevice.j0(tl.load(x + at)))
"""
SERVED = """
x, y = torch.randn(2, 100, device="cuda").unbind()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    a, b = x.to(dtype), y.to(dtype)
    out = torch.empty_like(a)
    mixed[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](a, b, out, 100, BLOCK=32, num_warps=2)
    assert torch.equal(out, torch.where(a > b, a * 2 + 1.5, torch.maximum(a, b) - b * a))  # read
rows = torch.randn(3, 20, device="cuda")
out = torch.empty_like(rows)
softmax[(3,)](rows, out, 20, BLOCK=32)
torch.testing.assert_close(out, rows.softmax(-1))  # read
for dtype in (torch.float32, torch.bfloat16):
    a, b = torch.randn(16, 40, device="cuda").to(dtype), torch.randn(40, 16, device="cuda").to(dtype)
    out = torch.empty(16, 16, dtype=dtype, device="cuda")
    product[(1,)](a, b, out, 40)  # device
    torch.testing.assert_close(out, (a.float() @ b.float()).to(dtype))  # read
assert product.best_config.kwargs == {"B": 16}
whole = torch.empty(16, dtype=torch.int32, device="cuda")
numbered[(1,)](torch.full((16,), 2.5, device="cuda").bfloat16(), whole, BLOCK=16)
assert whole.tolist() == list(range(2, 18))  # read
v, w = torch.randn(16, device="cuda"), torch.zeros(16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # device
    squashed[(1,)](v, w, BLOCK=16)
v.fill_(0.5)
graph.replay()
torch.testing.assert_close(w, v.tanh())  # read
try:
    squashed[(1,)](torch.randn(16), w, BLOCK=16)
    raise SystemExit("a kernel read the host's memory")
except ValueError:
    pass
squashed[(1,)](torch.randn(16).pin_memory(), w, BLOCK=16)
assert triton.runtime.driver.active.get_current_target().arch == 90
"""


def run(tmp_path: Path, text: str, interpret: str | None = None) -> tuple[int, str, dict[str, Any]]:
    """A program under the command, in a process in which Triton is not told to interpret: status, text, JSON report."""
    program, report = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(KERNELS + text)
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if interpret is not None:
        own["TRITON_INTERPRET"] = interpret
    command = [sys.executable, "-m", "headway.syncs", "--simulate", "--json", report, "--", "python", program]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False, env=own)
    return done.returncode, done.stderr, json.loads(report.read_text())


@pytest.mark.parametrize("interpret", [None, "1"])
def test_kernels_give_what_torch_gives_and_an_autotuner_waits(tmp_path: Path, interpret: str | None) -> None:
    status, text, report = run(tmp_path, SERVED, interpret)
    assert status == 0 and "PROVES NOTHING" not in text, text
    lines = (KERNELS + SERVED).splitlines()
    expected = {
        (number, line.rpartition("# ")[2])
        for number, line in enumerate(lines, 1)
        if line.endswith(("# read", "# device"))
    }
    assert {(finding["line"], finding["kind"]) for finding in report["findings"]} == expected


@pytest.mark.parametrize("kernel", ["assembled", "looked_up"])
def test_what_the_interpreter_cannot_run_is_refused_by_name(tmp_path: Path, kernel: str) -> None:
    call = f"x = torch.ones(16, device='cuda')\ntry:\n    {kernel}[(1,)](x, x, BLOCK=16)\nexcept Exception:\n    pass\n"
    status, text, _ = run(tmp_path, call)
    assert status == 2 and "PROVES NOTHING" in text and f"cannot run {kernel}" in text and "Run on a GPU" in text


def test_nothing_is_left_of_it() -> None:
    """Triton is as it was: its classes, its stand-ins for libdevice, and what finds modules."""
    code = """
import sys, torch
from headway import syncs
from headway.syncs.simulate import SimulationProbe
finders = list(sys.meta_path)
with syncs.record(probes=(SimulationProbe(),)):
    assert len(sys.meta_path) == len(finders) + 1
    import triton
    from triton.language.extra import libdevice
    from triton.runtime import interpreter, jit
    assert "headway" in jit.JITFunction.run.__module__ and "_simulated" in libdevice.tanh.__code__.co_names
assert sys.meta_path == finders and "headway" not in jit.JITFunction.run.__module__
assert not libdevice.tanh.__code__.co_names and not hasattr(interpreter.InterpreterBuilder, "get_bf16")
assert triton.runtime.driver._active is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
