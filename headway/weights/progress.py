"""Progress bars: people look before they read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, description: str, *, show: bool, unit: str = "it") -> Iterator[Callable[[int], object]]:
    """A bar on stderr when ``show`` and stderr is a terminal; yields a function that advances it.

    tqdm is imported only then, and its monitor thread is kept off: a library leaves no thread behind.
    """
    if not (show and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from tqdm import tqdm

    quiet = type("QuietBar", (tqdm,), {"monitor_interval": 0})
    with quiet(total=total, desc=description, unit=unit, unit_scale=unit == "B", file=sys.stderr) as bar:
        yield bar.update
