"""How many threads a CPU engine may use: what the scheduler lets this process run on, not what the machine has.

A container that gets 1.5 of 64 cores (``docker run --cpus 1.5``) sees all 64; with a thread for each it would use up its quota
in a moment of every period and stand still for the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_threads(
    *, membership: Path = Path("/proc/self/cgroup"), cgroups: Path = CGROUPS, topology: Path = TOPOLOGY
) -> int:
    """Physical cores that this process may run on, and no more than its CPU quota rounded up; at least 1.

    Two threads of one core share its arithmetic, so a second one only costs. A quota of 1.5 gives two threads: they are stopped
    for a quarter of the time, and one alone would leave a third of the quota unused.
    """
    cores = physical_cores(allowed_cpus(), topology)
    quota = cpu_quota(membership, cgroups)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def allowed_cpus() -> set[int]:
    """The CPUs of this process's affinity (cpusets of containers included)."""
    try:
        return set(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], topology: Path = TOPOLOGY) -> int:
    """How many cores the CPUs belong to; all of them where the topology is not told."""
    cores: set[str] = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            return len(cpus)
        cores.add(siblings.strip())
    return len(cores)


def cpu_quota(membership: Path, cgroups: Path) -> float | None:
    """CPUs that the control groups grant, the least along the way to the root; None without a limit. Knows versions 1 and 2."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for folder in (cgroups, cgroups / "unified"):
                limits += _limits(folder, group, "cpu.max")
        elif "cpu" in controllers.split(","):
            for folder in {cgroups / "cpu", cgroups / controllers}:
                limits += _limits(folder, group, "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min(limits, default=None)


def _limits(folder: Path, group: str, *files: str) -> Iterator[float]:
    """Limits of the group and all above it. Inside a container the group's own path may not exist; the root is then its own."""
    path = PurePosixPath(group.lstrip("/"))
    for place in (path, *path.parents):
        try:
            words = " ".join((folder / place / name).read_text(encoding="ascii") for name in files).split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            yield quota / period
