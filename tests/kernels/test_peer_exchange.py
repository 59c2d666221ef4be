"""``peer_gather_`` and ``peer_scatter_sum_``: what ranks that see each other's memory exchange around their experts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headway.kernels.peer_exchange import peer_gather_, peer_scatter_sum_
from headway.kernels.peer_reduce import CHUNK
from headway.kernels.registry import Op
from headway.kernels.testing import interpreter_loops
from tests.kernels.compiler_process import run_module
from tests.kernels.peer_buffers import START, PeerBuffers, own_buffers, total, values

COUNTS = [1, 63, CHUNK, 2 * CHUNK + 257, 4 * CHUNK]
UNITS = 5
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="host addresses are the interpreter's")


def together(buffers: PeerBuffers, op: Op, tensors: list[tuple[torch.Tensor, ...]], kernel: int | None) -> None:
    """All ranks at once: the references in threads, the rank ``kernel`` by its kernel."""
    failures: list[BaseException] = []

    def run(rank: int, call: Any) -> None:
        try:
            call(*tensors[rank], buffers.parity[rank], buffers.addresses, rank, buffers.size, START)
        except BaseException as error:
            failures.append(error)
            buffers.stop[0] = 1

    others = [rank for rank in range(buffers.size) if rank != kernel]
    threads = [threading.Thread(target=run, args=(rank, op.reference), daemon=True) for rank in others]
    for each in threads:
        each.start()
    if kernel is not None:
        with interpreter_loops(), patch("headway.kernels.peer_exchange.triton.num_sms", return_value=2):
            run(kernel, op.implementation("cuda"))
    for each in threads:
        each.join()
    assert not failures, failures
    assert not buffers.complaints()


def whole(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("size", "rank"), [(2, None), (2, 0), (3, 1)])
def test_every_rank_has_what_all_have(size: int, rank: int | None, dtype: torch.dtype) -> None:
    """Calls of many sizes, so that both halves of each unit are used again, between sums that use them, too."""
    if dtype is torch.bfloat16 and rank is not None:
        pytest.skip("the interpreter's bfloat16 is another's test")
    buffers = own_buffers(size, UNITS, dtype)
    for call, count in enumerate([*COUNTS, 63, CHUNK + 8]):
        seeds = [10 * call + each for each in range(size)]
        parts = [whole(count, seed) if dtype is torch.int32 else values(count, dtype, seed) for seed in seeds]
        wanted = torch.stack(
            [torch.where(each == -2147450880, 0, each) if dtype is torch.int32 else each for each in parts]
        )
        outs = [torch.full((size, count), 77, dtype=dtype) for _ in parts]
        together(buffers, peer_gather_, list(zip(parts, outs, strict=True)), rank)
        assert all(torch.equal(each, wanted.clone().masked_fill_(wanted.abs() < 1e-40, 0)) for each in outs), count
        if dtype is not torch.int32:
            x = [
                torch.stack([values(count, dtype, 100 * call + 10 * mine + peer) for peer in range(size)])
                for mine in range(size)
            ]
            out = [torch.full((count,), 77, dtype=dtype) for _ in x]
            together(buffers, peer_scatter_sum_, list(zip(x, out, strict=True)), rank)
            for mine, found in enumerate(out):
                assert torch.equal(found, total([each[mine] for each in x])), (count, mine)


@interpreted
def test_nobody_waits_for_a_rank_that_has_gone() -> None:
    buffers = own_buffers(2, UNITS, torch.float32)
    buffers.stop[0] = 1
    for op, x, out in (
        (peer_gather_, torch.ones(7), torch.ones(2, 7)),
        (peer_scatter_sum_, torch.ones(2, 7), torch.ones(7)),
    ):
        for call in (op.reference, op.implementation("cuda")):
            with interpreter_loops(), patch("headway.kernels.peer_reduce.triton.LOOKS", 8):
                call(x, out, buffers.parity[0], buffers.addresses, 0, 2, START)


@pytest.mark.slow
def test_compiles_for_every_card(tmp_path: Path) -> None:
    """Threads move 16 bytes at a time, and what waits is a volatile load."""
    pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
    said = run_module("tests.kernels.compile_peer", tmp_path, "exchange", "80", "90", "120")
    built = [json.loads(line) for line in said.splitlines()]
    assert {each["capability"] for each in built} == {80, 90, 120} and len(built) == 12
    for each in built:
        assert "v4.b32" in each["volatile"] and "v4.b32" in each["stores"], each
