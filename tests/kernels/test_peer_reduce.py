"""``peer_reduce_`` and ``peer_reduce_norm_``: sums over ranks that see each other's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.peer_reduce import CHUNK, part
from headway.kernels.rms_norm.reference import add_rms_norm
from headway.kernels.testing import interpreter_loops, kernel_dtypes
from tests.kernels.compiler_process import ROOT, run_module
from tests.kernels.peer_buffers import EPS, PeerBuffers, own_buffers, total, values

COUNTS = [1, 63, CHUNK, 2 * CHUNK + 257, 4 * CHUNK]
UNITS = 5
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="host addresses are the interpreter's")


def together(buffers: PeerBuffers, tensors: list[tuple[Any, ...]], two_shot: bool, kernel: int | None = None) -> None:
    """All ranks at once: the references in threads, the rank ``kernel`` by its kernel."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            buffers.reduce("reference", rank, two_shot, *tensors[rank])
        except BaseException as error:
            failures.append(error)
            buffers.stop[0] = 1

    waiting = [rank for rank in range(buffers.size) if rank != kernel]
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in waiting]
    for each in threads:
        each.start()
    if kernel is not None:
        # Interpreted programs do not run at the same time, and the references hand out sums unit by unit.
        with (
            interpreter_loops(),
            patch("headway.kernels.peer_reduce.triton.num_sms", return_value=1 if two_shot else 3),
        ):
            buffers.reduce("kernel", kernel, two_shot, *tensors[kernel])
    for each in threads:
        each.join()
    assert not failures, failures
    assert not buffers.complaints()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_same_sum(size: int, dtype: torch.dtype) -> None:
    """Calls of many sizes, in one shot and in two, so that both halves of each unit are used again."""
    buffers = own_buffers(size, UNITS, dtype)
    for call, count in enumerate([*COUNTS, *COUNTS]):
        parts = [values(count, dtype, 10 * call + rank) for rank in range(size)]
        found = [each.clone() for each in parts]
        together(buffers, [(each,) for each in found], call % 3 == 1)
        assert all(torch.equal(each, total(parts)) for each in found), count


@interpreted
@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 1)])
def test_a_kernel_among_references(size: int, rank: int, dtype: torch.dtype) -> None:
    buffers = own_buffers(size, UNITS, dtype)
    for call, count in enumerate([*COUNTS, 63, CHUNK + 8]):
        parts = [values(count, dtype, 10 * call + each) for each in range(size)]
        found = [each.clone() for each in parts]
        together(buffers, [(each,) for each in found], call % 3 == 1, rank)
        assert all(torch.equal(each, total(parts)) for each in found), count


@interpreted
@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("elements", [63, 160, 257])
def test_the_norm_in_the_same_kernel(elements: int, two_shot: bool, dtype: torch.dtype) -> None:
    """Residual and norm are those of ``add_rms_norm``; ranks 0 and 2 by the reference, rank 1 by the kernel."""
    buffers = own_buffers(3, UNITS, dtype, elements)
    weight = values(elements, torch.float32, 3).abs()
    for call, rows in enumerate((1, 5, 4, 2)):
        parts = [values(rows * elements, dtype, 10 * call + rank).view(rows, elements) for rank in range(3)]
        residual = values(rows * elements, dtype, 5).view(rows, elements)
        wanted = residual.clone()
        y = add_rms_norm(total(parts), wanted, weight, EPS, 0.5).to(dtype)
        given = [(each.clone(), residual.clone(), weight, torch.empty_like(each)) for each in parts]
        together(buffers, given, two_shot, 1)
        for (x, found, _, out), before in zip(given, parts, strict=True):
            assert torch.equal(found, wanted) and torch.equal(x, before)
            assert torch.allclose(out.float(), y.float(), rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-6)


@interpreted
def test_nobody_waits_for_a_rank_that_has_gone() -> None:
    buffers = own_buffers(2, UNITS, torch.float32)
    buffers.stop[0] = 1
    for kind in ("reference", "kernel"):
        with interpreter_loops(), patch("headway.kernels.peer_reduce.triton.LOOKS", 8):
            buffers.reduce(kind, 0, False, torch.ones(7))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("elements", [63, 64, 2048, 2880, 4096])
def test_parts_are_the_whole(size: int, elements: int) -> None:
    each = part(elements, size)
    assert each % 64 == 0 and each * size >= elements > 0
    assert each - 64 < elements / size <= each


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_kernels_of_several_processes(size: int, tmp_path: Path) -> None:
    """Every rank by its kernel, in a process of its own; memory is all they share."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.peer_process", str(tmp_path), str(size)]
    children = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = [each.communicate(timeout=120)[0] for each in children]
    assert said == [""] * size and all(each.returncode == 0 for each in children)


@pytest.mark.slow
def test_compiles_for_every_card(tmp_path: Path) -> None:
    """Threads move 16 bytes at a time, and what waits is a volatile load."""
    pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
    built = [
        json.loads(line) for line in run_module("tests.kernels.compile_peer", tmp_path, "80", "90", "120").splitlines()
    ]
    assert {each["capability"] for each in built} == {80, 90, 120} and len(built) == 18
    for each in built:
        assert "v4.b32" in each["volatile"] and "v4.b32" in each["stores"], each
