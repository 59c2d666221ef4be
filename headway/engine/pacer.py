"""How many steps to keep in flight."""

from __future__ import annotations

from headway.core.config import RunAhead

MAX_ADAPTIVE_DEPTH = 4
CALM_STEPS = 256
"""Launches in a row with spare headway before the depth is lowered: going down is cheap to get wrong, going up is not."""


class Pacer:
    """Chooses the run-ahead depth: enough to keep the device busy while the host works, no more, since a deeper queue makes
    newcomers wait.

    Args:
        run_ahead: a fixed depth, or "auto".
        asynchronous: whether the device works behind the host's back at all; if not, "auto" is 0.

    Attributes:
        depth: steps that may be in flight when a result is awaited.
    """

    def __init__(self, run_ahead: RunAhead, asynchronous: bool) -> None:
        self._adaptive = run_ahead == "auto" and asynchronous
        self.depth = (1 if asynchronous else 0) if run_ahead == "auto" else int(run_ahead)
        self._calm = 0

    @property
    def is_adaptive(self) -> bool:
        """Whether ``observe`` has any effect."""
        return self._adaptive

    def observe(self, ran_dry: bool, had_spare: bool) -> None:
        """Learn from one launch.

        Args:
            ran_dry: the device had finished all earlier steps by then.
            had_spare: at least two earlier steps were still unfinished.
        """
        if not self._adaptive:
            return
        if ran_dry:
            self.depth = min(self.depth + 1, MAX_ADAPTIVE_DEPTH)
            self._calm = 0
            return
        self._calm = self._calm + 1 if had_spare else 0
        if self._calm >= CALM_STEPS:
            self.depth = max(1, self.depth - 1)
            self._calm = 0
