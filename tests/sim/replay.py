"""``python -m tests.sim.replay SEED ...``: play scenarios that a test or a soak reported. ``FIRST-LAST`` is a range."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable

import torch

from tests.sim.harness import Scenario, play

STUCK_SECONDS = 120
"""One scenario takes well below a second of CPU time; after this long every thread's stack is printed, and that is the end."""


def main(arguments: list[str], on_start: Callable[[], object] = lambda: None) -> None:
    """Play them; ``on_start`` is called before each."""
    torch.set_num_threads(1)
    for argument in arguments:
        first, _, last = argument.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            scenario = Scenario(seed)
            print(
                f"seed {seed}: {len(scenario.requests)} requests, abort rate {scenario.abort_rate}, {scenario.overrides}"
            )
            on_start()
            play(seed)


if __name__ == "__main__":
    main(sys.argv[1:], lambda: faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True))
    faulthandler.cancel_dump_traceback_later()
