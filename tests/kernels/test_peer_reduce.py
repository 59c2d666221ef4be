"""``peer_reduce_``: sums over ranks that see each other's memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from headway.kernels.peer_reduce import CHUNK, peer_reduce_
from headway.kernels.testing import kernel_dtypes, make_random
from tests.kernels.compiler_process import run_module

PADS = 8


class Ranks:
    """Rooms and signals of all ranks, in this process's memory; rooms begin as garbage."""

    def __init__(self, size: int, numel: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.half = numel + 5
        self.rooms = [torch.full((2 * self.half,), float("nan"), dtype=dtype) for _ in range(size)]
        self.signals = [torch.zeros(size, PADS, dtype=torch.int32) for _ in range(size)]
        self.buffers = torch.tensor([each.data_ptr() for each in self.rooms])
        self.pads = torch.tensor([each.data_ptr() for each in self.signals])
        self.epochs = [torch.zeros(PADS, dtype=torch.int32) for _ in range(size)]

    def reduce(self, function: object, x: torch.Tensor, rank: int) -> None:
        assert callable(function)
        function(x, self.epochs[rank], self.buffers, self.pads, rank, self.size, self.half * x.itemsize)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("numel", [1, 63, CHUNK, 2 * CHUNK + 257])
def test_ranks_have_the_same_sum(numel: int, dtype: torch.dtype) -> None:
    """The reference on three ranks at once, three times, so that each half is used again."""
    ranks = Ranks(3, numel, dtype)
    for call in range(3):
        parts = [make_random(numel, dtype=dtype, device="cpu", seed=10 * call + rank) for rank in range(3)]
        wanted = sum((part.float() for part in parts), torch.zeros(numel)).to(dtype)
        found = [part.clone() for part in parts]
        threads = [
            threading.Thread(target=ranks.reduce, args=(peer_reduce_.reference, found[rank], rank)) for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="host addresses are the interpreter's")
@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("numel", [1, 63, 2 * CHUNK + 257])
def test_kernel_equals_reference(numel: int, dtype: torch.dtype) -> None:
    """Rank 1's kernel, once the others have written and signalled; the sum, what it wrote, and whom it told."""
    ranks, chunks = Ranks(3, numel, dtype), -(-numel // CHUNK)
    for call in (1, 2):
        parts = [make_random(numel, dtype=dtype, device="cpu", seed=10 * call + rank) for rank in range(3)]
        half = call % 2 * ranks.half
        for rank in (0, 2):
            ranks.rooms[rank][half : half + numel] = parts[rank]
            ranks.signals[1][rank, :chunks] = call
        found = parts[1].clone()
        ranks.reduce(peer_reduce_.implementation("cuda"), found, 1)
        assert torch.equal(found, sum((part.float() for part in parts), torch.zeros(numel)).to(dtype))
        assert torch.equal(ranks.rooms[1][half : half + numel], parts[1])
        assert ranks.rooms[1][half + numel : half + ranks.half].isnan().all(), "nothing is written behind it"
        for each in ranks.signals:
            assert each[1, :chunks].tolist() == [call] * chunks and not each[1, chunks:].any()
        assert ranks.epochs[1].tolist() == [call] * chunks + [0] * (PADS - chunks)


@pytest.mark.slow
def test_compiles_for_every_card(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs the compiler, not only the language")
    lines = run_module("tests.kernels.compile_peer", tmp_path, "80", "90", "120").splitlines()
    assert [json.loads(line)["capability"] for line in lines] == ["80", "90", "120"]
