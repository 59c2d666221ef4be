"""How many steps to keep in flight."""

from __future__ import annotations

from headway.core.config import RunAhead

MAX_ADAPTIVE_DEPTH, HOST_BOUND_DEPTH = 4, 2
"""Deepest queue; and where the host is slower than the device, which no depth helps but for an uneven step now and then."""
MARGIN = 1.5
"""The headway to keep, in host times of a step: what the next launch needs, and half as much for what comes between."""
WINDOW = 32
"""Steps that are judged together."""
MOST_LOW = 6
"""Steps of a window that may have less headway than the margin; a hiccup of the host costs two or three."""
CALM_WINDOWS = 4
"""Windows in a row that could have done with a step less in flight before the depth is lowered."""
SMOOTHING = 1 / 16
"""Weight of the newest step in the means."""


def _smooth(mean: float, newest: float) -> float:
    """The mean with the newest value in it. One of more than twice the mean counts as that: a step with a long prompt now
    and then, which feeds the device while it is launched, says little of the others."""
    return mean + (min(newest, 2 * mean) - mean) * SMOOTHING if mean else newest


class Pacer:
    """Chooses the run-ahead depth: the least that keeps the measured headway above ``MARGIN`` host times of a step. A deeper
    queue would make newcomers wait: their prompt runs behind all steps in flight.

    With d steps in flight the headway is about d device times of a step less the host's own time. So a step less in flight
    means a step's device time less of headway.

    Args:
        run_ahead: a fixed depth, or "auto".
        asynchronous: whether the device works behind the host's back at all; if not, "auto" is 0.

    Attributes:
        depth: steps that may be in flight when a result is awaited.
    """

    def __init__(self, run_ahead: RunAhead, asynchronous: bool) -> None:
        self._adaptive = run_ahead == "auto" and asynchronous
        self.depth = (1 if asynchronous else 0) if run_ahead == "auto" else int(run_ahead)
        self._host_us = self._device_us = 0.0
        self._calm_windows = 0
        self._begin(0)

    def observe(self, headway_us: float, device_us: float, host_us: float) -> None:
        """Learn from one finished step; does nothing at a fixed depth.

        Args:
            headway_us: work that was queued on the device when the step was submitted.
            device_us, host_us: what it took the device, and the host.
        """
        if not self._adaptive:
            return
        self._host_us = _smooth(self._host_us, host_us)
        self._device_us = _smooth(self._device_us, device_us)
        if self._passing:  # launched when the depth was another
            self._passing -= 1
            return
        margin = MARGIN * self._host_us
        self._seen += 1
        self._low += headway_us < margin
        self._tight += headway_us - self._device_us < margin
        deepest = MAX_ADAPTIVE_DEPTH if self._device_us > self._host_us else HOST_BOUND_DEPTH
        if self._low > MOST_LOW and self.depth < deepest:
            self._move(1)
        elif self._seen == WINDOW:
            self._calm_windows = self._calm_windows + 1 if self._tight <= MOST_LOW or self.depth > deepest else 0
            if self._calm_windows == CALM_WINDOWS and self.depth > 1:
                self._move(-1)
            else:
                self._begin(0)

    def _move(self, by: int) -> None:
        self._calm_windows = 0
        self._begin(max(self.depth, self.depth + by) + 1)
        self.depth += by

    def _begin(self, passing: int) -> None:
        """A new window, ``passing`` steps from now."""
        self._passing, self._seen, self._low, self._tight = passing, 0, 0, 0
