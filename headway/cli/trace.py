"""``--trace FILE``: the timeline of ``headway syncs`` for a piece of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.core.errors import ConfigError
from headway.syncs import ProbeError
from headway.syncs.allowlist import AllowList
from headway.syncs.report import Run, to_dict, write_html
from headway.syncs.runtime import CudaRuntime
from headway.syncs.session import watch


def require_tracing() -> None:
    """Raise ConfigError where there is nothing to trace: before a benchmark's minutes, not after them."""
    try:
        CudaRuntime().require()
    except ProbeError as error:
        raise ConfigError(f"--trace: {error}") from error


def write_timeline(path: Path, command: str, work: Callable[[], object], *, simulate: bool = False) -> str:
    """Do ``work`` once more, under torch.profiler, and write the page: host threads, GPU streams, gaps, waits.

    The profiler slows the host, so ``work`` should be short (a few dozen steps) and come after what was measured. The
    engine must live in this process.

    Args:
        command: what the page says was run.
        simulate: pretend CUDA; for tests of what calls this.

    Returns:
        One line for people: where the page is, and what it shows.

    Raises:
        ConfigError: nothing can be traced here, with the reason.
    """

    def once() -> int:
        work()
        return 0

    try:
        run = watch(once, [command], AllowList(), simulate=simulate, driver="profiler")
    except ProbeError as error:
        raise ConfigError(f"--trace: {error}") from error
    if run.subprocesses:
        run.notes.append("an engine in a process of its own is not in this picture: leave out --multiprocess")
    write_html(run, path)
    return f"trace: {path}: {_said(run)}"


def _said(run: Run) -> str:
    data = to_dict(run)
    busy = "" if data["gpu"] is None else f"GPU busy {data['gpu']['busy_percent']} % (profiled), "
    totals = data["totals"]
    return f"{busy}{totals['unsanctioned']} host waits, {totals['sanctioned']} of back-pressure or otherwise allowed"
