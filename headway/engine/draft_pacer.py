"""How many drafts pay at the moment: longer rows bring more tokens a step, and their steps take longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PROBE_STEPS = 8
"""Steps of a width before it is judged."""
PLAIN_STEPS = 4
"""The same for steps without drafts."""
STALE_STEPS = 1
"""First steps of rows with more drafts than before: nobody has drafted that far for them."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps with fewer drafts than there can be until all are tried again; twice as many each time they do not pay again."""
TRUSTED_STEPS = 4096
"""Steps after which a time that was measured says nothing any more: texts have grown."""
SMOOTHING = 1 / 8
"""Weight of the newest step in mean times."""
REMEMBERED_ROWS = 64
"""Acceptance is that of about so many rows, or of the rows of ``PROBE_STEPS`` steps where these are more."""
MARGIN = 1.03
"""How much better another width must promise to be: times and acceptance are noisy."""


@dataclass(slots=True)
class _Time:
    """Mean microseconds of a step, and the number of the last step that was measured."""

    us: float
    measured: int


class DraftPacer:
    """Chooses the width of the next steps' decode rows among a few.

    Of the widths w the one is taken whose rows bring most tokens in a time, E(w) / T(w). With a_i, the share of i-th drafts
    that are accepted where all before them were, E(w) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_(w-1) (the expectation of
    Leviathan et al. 2023, arXiv:2211.17192, section 3.1, without its assumption that all a_i are equal). T(w) is the mean
    time of a step at the present number of rows, by powers of two; a width that has not run there lately is taken to cost no
    more than the next narrower one that has, so that it is tried where it may pay. Both are measured as steps finish. Where
    fewer than all drafts are best, all are tried again after a pause, since nothing is learned of drafts that are not made.
    Tokens do not depend on any of this.

    Args:
        widths: that there are, rising: 1, and tokens of rows with some and with all drafts.
        trusted_steps, remembered_rows: see the constants.

    Attributes:
        width: of the next steps' rows.
        saved_us: what steps with drafts took less than as many tokens without would have, by the mean time of a plain step of
            as many rows; below zero where drafts cost more. Steps of numbers of rows without such a time do not count.
    """

    def __init__(
        self, widths: Sequence[int], *, trusted_steps: int = TRUSTED_STEPS, remembered_rows: int = REMEMBERED_ROWS
    ) -> None:
        self._trusted_steps, self._remembered_rows = trusted_steps, remembered_rows
        self._widths = list(widths)
        self._full = self.width = self._widths[-1]
        self._tried, self._right = [0.0] * self._full, [0.0] * self._full  # by place of the draft; 0 is no draft's
        self._loads: dict[int, dict[int, _Time]] = {}
        self._load = 0
        self._steps = self._since = self._stale = 0
        self._left = 0  # steps until all drafts are tried again
        self._pause = FIRST_PAUSE
        self.saved_us = 0.0

    def observe(self, width: int, reached: Sequence[int], step_us: float | None) -> int:
        """Learn from a finished step; returns the width of the next ones.

        Args:
            width: of its decode rows.
            reached: of each place the decode rows that brought a token there; the first number is that of all that brought any.
            step_us: what it took; None where prompts ran beside them.
        """
        self._steps += 1
        rows = reached[0]
        self._account(width, reached, step_us)
        if not rows or width != self.width:  # it was launched before the last change
            return self.width
        moved = rows.bit_length() != self._load
        self._load = rows.bit_length()
        if width > 1 and self._stale:
            self._stale -= 1
            return self.width
        self._since += 1
        self._learn(reached, step_us)
        if width < self._full:
            self._left = min(self._left, PROBE_STEPS) if moved else self._left - 1
            if self._left <= 0:
                self._try_all()
                return self.width
        if self._since >= (PROBE_STEPS if width > 1 else PLAIN_STEPS):
            self._judge(self._loads[self._load])
        return self.width

    def _account(self, width: int, reached: Sequence[int], step_us: float | None) -> None:
        plain = self._loads.get(reached[0].bit_length(), {}).get(1)
        if width > 1 and reached[0] and step_us is not None and plain is not None:
            self.saved_us += plain.us * sum(reached) / reached[0] - step_us

    def _learn(self, reached: Sequence[int], step_us: float | None) -> None:
        most = max(self._remembered_rows, PROBE_STEPS * reached[0])
        for place in range(1, self.width):
            self._tried[place] += reached[place - 1]
            self._right[place] += reached[place]
            self._forget(place, most)
        times = self._loads.setdefault(self._load, {})
        if step_us is not None:
            known = times.get(self.width)
            if known is None or self._steps - known.measured > self._trusted_steps:
                mean = step_us  # what it was so long ago has no part in it
            else:
                mean = known.us + (step_us - known.us) * SMOOTHING
            times[self.width] = _Time(mean, self._steps)

    def _forget(self, place: int, most: float) -> None:
        if self._tried[place] > most:
            self._right[place] *= most / self._tried[place]
            self._tried[place] = most

    def _judge(self, times: dict[int, _Time]) -> None:
        if self.width not in times:
            return
        known = {width: each.us for width, each in times.items() if self._steps - each.measured <= self._trusted_steps}
        if 1 not in known:
            self._switch(1)
            self._left = self._pause
            return
        worth = {
            width: self._tokens(width) / known[max(each for each in known if each <= width)] for width in self._widths
        }
        best = max(worth, key=worth.__getitem__)
        if best == self.width or worth[best] < MARGIN * worth[self.width]:
            if self.width == self._full and self._since >= 4 * PROBE_STEPS:
                self._pause = FIRST_PAUSE
            return
        if self.width == self._full:
            self._left = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._switch(best)

    def _tokens(self, width: int) -> float:
        """E(width); a draft that has never been tried is taken for as good as the one before it."""
        total = chance = share = 1.0
        for place in range(1, width):
            if self._tried[place]:
                share = self._right[place] / self._tried[place]
            chance *= share
            total += chance
        return total

    def _try_all(self) -> None:
        """What the texts were like is long ago: what comes now shall count for more."""
        for place in range(1, self._full):
            self._forget(place, 1.0)
        self._switch(self._full)

    def _switch(self, width: int) -> None:
        self._stale = STALE_STEPS if width > self.width else 0
        self.width, self._since = width, 0
