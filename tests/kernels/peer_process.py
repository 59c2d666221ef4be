"""A rank of ``peer_reduce_`` in a process of its own, by Triton's interpreter; run by ``test_peer_reduce``.

    python -m tests.kernels.peer_process FOLDER SIZE RANK

The buffers are files that all map. Prints what is wrong, if anything.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from headway.kernels.peer_reduce import CHUNK
from headway.kernels.rms_norm.reference import add_rms_norm
from headway.kernels.testing import interpreter_loops
from tests.kernels.peer_buffers import EPS, PeerBuffers, buffer_ints, total, values

CALLS = ((1, False), (3 * CHUNK + 5, False), (CHUNK + 64, True), (5 * CHUNK, True), (63, False), (4 * CHUNK + 1, False))
"""Elements, and whether two_shot."""
UNITS, ROW = 6, 160


def main(folder: Path, size: int, rank: int) -> list[str]:
    """Sums, then sums with norms, in one order on all ranks."""
    dtype, found = torch.float32, []
    for elements in (CHUNK, ROW):
        ints = buffer_ints(UNITS, elements, 4, size)
        names = [folder / f"{elements}-{n}" for n in range(size + 1)]
        memories = [torch.from_file(str(each), shared=True, size=ints, dtype=torch.int16) for each in names]
        ready = folder / f"{elements}-ready"
        buffers = PeerBuffers(memories, UNITS, elements, 4, fresh=not rank)
        if not rank:
            ready.touch()
        while not ready.exists():
            time.sleep(0.01)
        for call, (count, two) in enumerate(CALLS):
            count = count if elements == CHUNK else (1 + call % UNITS) * ROW
            parts = [values(count, dtype, 10 * call + n) for n in range(size)]
            if elements == CHUNK:
                x = parts[rank].clone()
                buffers.reduce("kernel", rank, two, x)
                same = torch.equal(x, total(parts))
            else:
                residual, weight = values(count, dtype, 77).view(-1, ROW), torch.linspace(0.5, 2, ROW)
                wanted, out = residual.clone(), torch.empty_like(residual)
                y = add_rms_norm(total(parts).view(-1, ROW), wanted, weight, EPS, 0.5)
                buffers.reduce("kernel", rank, two, parts[rank].view(-1, ROW), residual, weight, out)
                same = torch.equal(residual, wanted) and torch.allclose(out, y, rtol=1e-5, atol=1e-5)
            if not same:
                found.append(f"call {call} with {count} elements, two_shot {two}, units of {elements}")
    return found


if __name__ == "__main__":
    with interpreter_loops():
        print("\n".join(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), end="")
