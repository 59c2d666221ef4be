"""Whether drafts pay at the moment: rows of drafts bring more tokens a step, and their steps take longer."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_STEPS = 8
"""Steps with drafts before they are judged."""
PLAIN_STEPS = 4
"""Steps without, to know how long these take."""
STALE_STEPS = 1
"""First steps with drafts after some without: nobody has drafted for them."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps without drafts once they did not pay; twice as many each time they do not pay again."""
TRUSTED_STEPS = 4096
"""Steps after which the time of a step without drafts is measured again."""
SMOOTHING = 1 / 8
"""Weight of the newest step in means."""


@dataclass(slots=True)
class _Load:
    """Steps of about so many rows: microseconds without and with drafts, 0 while unknown; when the former was measured."""

    plain_us: float = 0.0
    draft_us: float = 0.0
    measured: int = 0


class DraftPacer:
    """Chooses the width of the next steps' decode rows: all drafts, or none.

    Drafts pay while mean tokens a row > time of a step with drafts / time of one without, at the present number of rows, by
    powers of two. Both times are measured; where drafts do not pay they are tried again after a pause. Tokens do not depend on
    any of this.

    Args:
        width: tokens of a row with all its drafts.

    Attributes:
        width: of the next steps' rows.
    """

    def __init__(self, width: int) -> None:
        self._full = self.width = width
        self._length = 0.0
        self._loads: dict[int, _Load] = {}
        self._load = 0
        self._steps = self._since = self._stale = 0
        self._left = 0  # steps without drafts still to come
        self._pause = FIRST_PAUSE

    def observe(self, width: int, rows: int, tokens: int, step_us: float | None) -> int:
        """Learn from a finished step; returns the width of the next ones.

        Args:
            width: of its decode rows.
            rows: decode rows that brought tokens, ``tokens`` in all.
            step_us: what it took; None where prompts ran beside them.
        """
        self._steps += 1
        if not rows or width != self.width:  # it was launched before the last change
            return self.width
        moved = rows.bit_length() != self._load
        self._load = rows.bit_length()
        load = self._loads.setdefault(self._load, _Load())
        self._since += 1
        if width == 1:
            if step_us is not None:
                load.plain_us = _smooth(load.plain_us, step_us)
                load.measured = self._steps
            self._left = min(self._left, PROBE_STEPS) if moved else self._left - 1
            if self._left <= 0:
                self._switch(self._full)
        elif self._stale:
            self._stale -= 1
        else:
            self._length = _smooth(self._length, tokens / rows)
            if step_us is not None:
                load.draft_us = _smooth(load.draft_us, step_us)
            if self._since >= PROBE_STEPS:
                self._judge(load)
        return self.width

    def _judge(self, load: _Load) -> None:
        if not load.draft_us:
            return
        if not load.plain_us or self._steps - load.measured > TRUSTED_STEPS:
            self._switch(1, PLAIN_STEPS)
        elif self._length * load.plain_us < load.draft_us:
            self._switch(1, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._since >= 4 * PROBE_STEPS:
            self._pause = FIRST_PAUSE

    def _switch(self, width: int, steps: int = 0) -> None:
        self.width, self._left, self._since, self._stale = width, steps, 0, STALE_STEPS
        if width > 1:
            self._length = 0.0  # what the texts were like is long ago


def _smooth(mean: float, newest: float) -> float:
    return mean + (newest - mean) * SMOOTHING if mean else newest
