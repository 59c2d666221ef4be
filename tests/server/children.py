"""The processes that this one has begun, and their memory, as Linux tells them."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEBIBYTE = 1024


def resident(pid: int) -> int:
    """KiB that a process has in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def children(module: str) -> dict[int, int]:
    """Process ids of our children that run ``module``, and what ``resident`` says of each."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            own = (task / "children").read_text().split()
        except OSError:  # the thread has ended; its children are another's now
            continue
        for pid in map(int, own):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found[pid] = resident(pid)
    return found


class Kept:
    """What processes and memory were when it was made.

    Args:
        module: of the children.
    """

    def __init__(self, module: str) -> None:
        self._module, self._children, self._own = module, children(module), resident(os.getpid())

    def check(self, most: int = 24 * MEBIBYTE) -> None:
        """Raises AssertionError unless the same processes are there, and neither they nor this one grew by ``most`` KiB."""
        now = children(self._module)
        assert self._children and now.keys() == self._children.keys(), (self._children, now)
        grown = {pid: now[pid] - before for pid, before in self._children.items()}
        grown[os.getpid()] = resident(os.getpid()) - self._own
        assert max(grown.values()) < most, grown
