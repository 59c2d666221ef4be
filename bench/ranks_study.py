"""What 8, 64 and 512 ranks that share experts cost the host, from parts measured here and a simulation of the rest.

    python bench/ranks_study.py            prints the table of docs/parallel.md

Measured: what a rank spends on the agreement in a step, by the number of ranks; encoding a launch and writing it into a ring.
Simulated: steps of a given device time, whose host work varies and now and then hiccups, and letters that take a while. A step
begins on the device when the last rank has launched it, and a rank launches it when it knows its size.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from headway.parallel.dp import Agreement, Letter, Want

HOST_US, HICCUP_US, HICCUPS = 400.0, 3000.0, 1 / 500
"""Of a step of a rank: what scheduling, packing and launching take, and how long and how often something else comes between."""
LETTER_US = {"one host": 30.0, "many hosts": 80.0}
STEPS = 1500


class _Nowhere:
    def send(self, letter: Letter) -> None:
        letter.encode()


def agreement_us(ranks: int, steps: int = 200) -> float:
    """Host time of a step's agreement on one of ``ranks`` ranks, microseconds; letters come encoded."""
    own = Agreement(0, ranks, _Nowhere(), depth=2, sizes=[2**n for n in range(3, 14)])
    own.wake()
    want, took = Want(64, 64), 0.0
    for step in range(steps):
        letters = [Letter(rank, 1, step + 2, want).encode() for rank in range(1, ranks)]
        start = time.perf_counter()
        assert own.begin(want)
        for letter in letters:
            own.take(Letter.decode(letter))
        own.next()
        took += time.perf_counter() - start
    return took / steps * 1e6


@dataclass(frozen=True)
class Study:
    """One line of the table: ``host_us`` is what the agreement adds; ``letter_us`` how long a letter takes."""

    ranks: int
    device_us: float
    depth: int
    host_us: float
    letter_us: float

    def step_us(self, seed: int = 0) -> float:
        """Mean time of a step."""
        rng = np.random.default_rng(seed)
        done = np.zeros(STEPS)
        published = np.zeros((STEPS, self.ranks))
        free = np.zeros(self.ranks)
        for step in range(STEPS):
            ready = free.copy()
            if step > self.depth:  # as many steps may be in flight
                ready = np.maximum(ready, done[step - self.depth - 1])
            published[step] = ready
            if step >= self.depth:
                ready = np.maximum(ready, published[step - self.depth].max() + self.letter_us)
            work = rng.gamma(16.0, HOST_US / 16.0, self.ranks) + self.host_us
            work += rng.exponential(HICCUP_US, self.ranks) * (rng.random(self.ranks) < HICCUPS)
            free = ready + work
            done[step] = max(done[step - 1] if step else 0.0, float(free.max())) + self.device_us
        half = STEPS // 2
        return float(done[-1] - done[half - 1]) / (STEPS - half)


def main() -> None:
    """Measure, simulate, print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cost = {ranks: agreement_us(ranks) for ranks in (8, 64, 71, 512)}
    print(
        "| ranks | letters a rank and step | agreement, host | step of 4 ms, depth 1 / 2 / 4 | step of 15 ms, depth 1 / 2 / 4 |"
    )
    print("|---|---|---|---|---|")
    cases = [
        (8, 7, cost[8], "one host", 1),
        (64, 63, cost[64], "many hosts", 1),
        (512, 511, cost[512], "many hosts", 1),
    ]
    cases.append((512, 70, cost[71], "many hosts", 2))  # 7 letters on the host, 63 between hosts
    for ranks, letters, host, where, hops in cases:
        cells = []
        for device in (4000.0, 15000.0):
            found = [Study(ranks, device, depth, host, hops * LETTER_US[where]).step_us() for depth in (1, 2, 4)]
            cells.append(" / ".join(f"{each / 1000:.2f}" for each in found) + " ms")
        name = f"{ranks}, by hosts" if hops > 1 else str(ranks)
        print(f"| {name} | {letters} | {host / 1000:.2f} ms | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
