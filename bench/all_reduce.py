"""All-reduce of our own (``kernels/peer_reduce``) against NCCL's, by size, on the GPUs of one host.

    python bench/all_reduce.py [--ranks 2]

Prints microseconds of one reduction inside a captured graph of 50, the median of 20 replays on rank 0. Rooms and signals lie in
torch's symmetric memory, without multicast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable

import torch

SIZES = [2**n for n in range(10, 24)]
EACH, REPLAYS = 50, 20


def timed(do: Callable[[], object]) -> float:
    """Microseconds of ``do`` inside a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            do()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
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
    return statistics.median(took)


def rank(number: int, ranks: int, store: str) -> None:
    """One rank's process."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    from headway.kernels.peer_reduce import CHUNK, peer_reduce_

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=number, world_size=ranks, device_id=device)
    most = max(SIZES)
    chunks = -(-most // 2 // CHUNK)
    room = symmetric.empty(2 * most, dtype=torch.uint8, device=device)
    pads = symmetric.empty(ranks * chunks, dtype=torch.int32, device=device).zero_()
    rooms, signals = (symmetric.rendezvous(each, dist.group.WORLD).buffer_ptrs for each in (room, pads))
    addresses = [torch.tensor(each, dtype=torch.int64, device=device) for each in (rooms, signals)]
    epochs = torch.zeros(chunks, dtype=torch.int32, device=device)
    dist.barrier()
    if not number:
        print("| bytes | NCCL | ours |\n|---|---|---|")
    for size in SIZES:
        x = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        nccl = timed(lambda x=x: dist.all_reduce(x))
        ours = timed(lambda x=x: peer_reduce_(x, epochs, *addresses, number, ranks, most))
        y = torch.full((size // 2,), float(number + 1), dtype=torch.bfloat16, device=device)
        peer_reduce_(y, epochs, *addresses, number, ranks, most)
        assert bool((y == ranks * (ranks + 1) / 2).all()), "wrong sums"
        if not number:
            print(f"| {size} | {nccl:.1f} us | {ours:.1f} us |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        children = [context.Process(target=rank, args=(n, ranks, f"{folder}/store")) for n in range(ranks)]
        for each in children:
            each.start()
        for each in children:
            each.join()


if __name__ == "__main__":
    main()
