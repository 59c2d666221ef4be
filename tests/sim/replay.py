"""``python -m tests.sim.replay SEED ...``: play scenarios that a test or a soak reported. ``FIRST-LAST`` is a range."""

from __future__ import annotations

import sys

import torch

from tests.sim.harness import Scenario, play


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    for argument in arguments:
        first, _, last = argument.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            scenario = Scenario(seed)
            print(
                f"seed {seed}: {len(scenario.requests)} requests, abort rate {scenario.abort_rate}, {scenario.overrides}"
            )
            play(seed)


if __name__ == "__main__":
    main(sys.argv[1:])
