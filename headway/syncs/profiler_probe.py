"""The fallback at the driver boundary: torch.profiler's CUPTI records, read when the run is over."""

from __future__ import annotations

import threading
from typing import Any

import torch

from headway.syncs import recording
from headway.syncs.errors import ProbeError
from headway.syncs.live import ANNOTATION
from headway.syncs.trace import END, PROOF, Trace, may_wait, read


class ProfilerRun:
    """A whole-program recording: ``with ProfilerRun() as run: ...``, then ``run.trace``.

    Attributes:
        trace: available after the block.
    """

    name = "profiler"
    watches = "every blocking CUDA runtime and driver call, from torch.profiler's CUPTI records, after the run"

    def __init__(self) -> None:
        self._profile: Any = None
        self._threads: dict[int, str] = {}
        self.trace = Trace([], {}, False)

    def __enter__(self) -> ProfilerRun:
        """Start recording, with one deliberate wait as proof.

        Raises:
            ProbeError: no CUDA, or the profiler cannot record it.
        """
        self._profile = recording.profile(recording.activities())
        self._profile.__enter__()
        self.mark()
        return self

    def know_thread(self) -> None:
        """Remember this thread's name: the records only have numbers."""
        self._threads[threading.get_native_id()] = threading.current_thread().name

    def mark(self) -> None:
        """One deliberate wait; what the trace holds before the last of these is set-up, not the program's."""
        with torch.profiler.record_function(PROOF):
            torch.cuda.synchronize()

    def __exit__(self, *error: object) -> None:
        with torch.profiler.record_function(END):
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        results, self._profile = self._profile.profiler.kineto_results, None
        self.trace = read(recording.read(results, ANNOTATION, may_wait), self._threads)

    def require_proof(self) -> Trace:
        """The trace.

        Raises:
            ProbeError: not even the deliberate wait was recorded, so its silence means nothing.
        """
        if not self.trace.proven:
            raise ProbeError(
                "torch.profiler recorded no CUDA call, not even a deliberate wait: is CUPTI busy or forbidden?"
            )
        return self.trace
