"""All-reduce of our own (``kernels/peer_reduce``) against NCCL's, by size, on the GPUs of one host.

    python bench/all_reduce.py [--ranks 2] [--json FILE]

Prints microseconds of one reduction inside a captured graph of 50, the median of 20 replays on rank 0: of a sum, and of a sum
with the addition to the residual and the norm behind it, in rows of 4,096. Sums are compared with NCCL's on all ranks first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = [2**n for n in range(10, 24)]
EACH, REPLAYS = 50, 20
ROW = 4096
COLUMNS = ("bytes", "nccl", "one_shot", "two_shot", "nccl_norm", "one_shot_norm", "two_shot_norm")


def timed(do: Callable[[], object]) -> float:
    """Microseconds of ``do`` inside a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            do()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events meanwhile, on a thread of its own.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(EACH):
                do()
        took = []
        for _ in range(REPLAYS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            took.append(begun.elapsed_time(ended) * 1000 / EACH)
    return round(statistics.median(took), 2)


class Ways:
    """The ways of one rank to a sum.

    Attributes:
        peers: by way of memory.
        two: whether that is in two shots.
    """

    def __init__(self, number: int, ranks: int, device: torch.device) -> None:
        import torch.distributed as dist

        from headway.parallel.peer_buffers import Driver, cards_here, meet
        from headway.parallel.peers import Peers, buffer_bytes

        def gather(said: bytes) -> list[bytes]:
            found: list[Any] = [None] * ranks
            own = torch.zeros(256, dtype=torch.uint8, device=device)
            own[: len(said) + 1] = torch.tensor([len(said), *said], dtype=torch.uint8)
            every = torch.empty(ranks, 256, dtype=torch.uint8, device=device)
            dist.all_gather_into_tensor(every, own)
            for rank, words in enumerate(every.tolist()):
                found[rank] = bytes(words[1 : 1 + words[0]])
            return found

        self.two, most = False, max(SIZES)
        buffers = meet(Driver, cards_here(), number, number, buffer_bytes(ranks, most), gather)
        self.peers = Peers(buffers, number, ranks, device, most)
        self.peers.two_shot = lambda x: self.two  # type: ignore[method-assign]
        wrong = [each.decode() for each in gather(self.peers.try_out().encode()) if each]
        if wrong:
            raise SystemExit("; ".join(wrong))

    def sum(self, x: torch.Tensor, two: bool) -> None:
        self.two = two
        exchange = self.peers.sum(x)
        assert exchange is not None
        exchange()

    def norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, two: bool) -> None:
        self.two = two
        exchange = self.peers.sum_norm(x, residual, weight, out, 1e-5, 1.0)
        assert exchange is not None
        exchange()


def measured(ways: Ways, size: int, number: int, device: torch.device) -> dict[str, float]:
    """One row of the table."""
    import torch.distributed as dist

    from headway.kernels.rms_norm import add_rms_norm

    given = torch.randn(size // 2, device=device, generator=torch.Generator(device).manual_seed(number)).bfloat16()
    wanted = given.float()
    dist.all_reduce(wanted)
    for two in (False, True, False, True):
        x = given.clone()
        ways.sum(x, two)
        assert torch.equal(x, wanted.bfloat16()), f"wrong sums of {size} bytes, two_shot {two}"
    found: dict[str, float] = {"bytes": size}
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    found["nccl"] = timed(lambda: dist.all_reduce(x))
    found["one_shot"] = timed(lambda: ways.sum(x, False))
    found["two_shot"] = timed(lambda: ways.sum(x, True))
    if size // 2 < ROW:
        return found
    x = x.view(-1, ROW)
    weight, residual, out = torch.ones(ROW, dtype=x.dtype, device=device), torch.zeros_like(x), torch.empty_like(x)
    y = add_rms_norm(wanted.bfloat16().view(-1, ROW), torch.ones_like(x), weight, 1e-5, 1.0)
    for two in (False, True):
        ones = torch.ones_like(x)
        ways.norm(given.view(-1, ROW), ones, weight, out, two)
        assert torch.allclose(out.float(), y.float(), rtol=1e-2, atol=1e-2), (
            f"wrong norms of {size} bytes, two_shot {two}"
        )

    def separate() -> None:
        dist.all_reduce(x)
        add_rms_norm(x, residual, weight, 1e-5, 1.0)

    found["nccl_norm"] = timed(separate)
    found["one_shot_norm"] = timed(lambda: ways.norm(x, residual, weight, out, False))
    found["two_shot_norm"] = timed(lambda: ways.norm(x, residual, weight, out, True))
    return found


def rank(number: int, ranks: int, store: str, path: str) -> None:
    """One rank's process."""
    import torch.distributed as dist

    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=number, world_size=ranks, device_id=device)
    ways, rows = Ways(number, ranks, device), []
    if not number:
        print(" ".join(COLUMNS), flush=True)
    for size in SIZES:
        rows.append(measured(ways, size, number, device))
        if not number:
            print(" ".join(str(rows[-1].get(each, "-")) for each in COLUMNS), flush=True)
            if path:
                Path(path).write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=rank, args=(n, args.ranks, f"{folder}/store", args.json)) for n in range(args.ranks)
        ]
        for each in children:
            each.start()
        for each in children:
            each.join()
    sys.exit(max(abs(each.exitcode or 0) for each in children))


if __name__ == "__main__":
    main()
