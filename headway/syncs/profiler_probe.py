"""The fallback at the driver boundary: torch.profiler's CUPTI records, read when the run is over."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from headway.syncs.errors import ProbeError
from headway.syncs.trace import END, PROOF, Trace, read


class ProfilerRun:
    """A whole-program recording: ``with ProfilerRun() as run: ...``, then ``run.trace``.

    Attributes:
        trace: available after the block.
    """

    name = "profiler"
    watches = "every blocking CUDA runtime and driver call, from torch.profiler's CUPTI records, after the run"

    def __init__(self, with_stack: bool = True) -> None:
        self._with_stack = with_stack
        self._profile: Any = None
        self.trace = Trace([], {}, False)

    def __enter__(self) -> ProfilerRun:
        """Start recording, with one deliberate wait as proof.

        Raises:
            ProbeError: no CUDA, or the profiler cannot record it.
        """
        import torch

        if not torch.cuda.is_available():
            raise ProbeError("the profiler has no CUDA device to record")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            raise ProbeError("this torch is built without CUPTI: torch.profiler cannot record CUDA calls")
        self._profile = torch.profiler.profile(activities=activities, with_stack=self._with_stack)
        self._profile.__enter__()
        self.mark()
        return self

    def mark(self) -> None:
        """One deliberate wait; what the trace holds before the last of these is set-up, not the program's."""
        import torch

        with torch.profiler.record_function(PROOF):
            torch.cuda.synchronize()

    def __exit__(self, *error: object) -> None:
        import torch

        with torch.profiler.record_function(END):
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            text = path.read_text(encoding="utf-8")
        try:
            self.trace = read(json.loads(text))
        except json.JSONDecodeError as broken:
            near = text[max(0, broken.pos - 120) : broken.pos + 40]
            raise ProbeError(f"torch.profiler wrote a trace that is no JSON ({broken}), near {near!r}") from None

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
