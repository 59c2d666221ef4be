"""``step()``: where one step of a program ends and the next begins, so that a report can tell start-up from steady state."""

from __future__ import annotations

from typing import Final


class Steps:
    """How often the program has called ``step()``. One per process, as a program's main loop is."""

    def __init__(self) -> None:
        self.number: int | None = None

    def next(self) -> None:
        """Another step begins."""
        self.number = (self.number or 0) + 1


STEPS: Final = Steps()


def step() -> None:
    """Say that a step of the program begins. What waited before the first call is start-up."""
    STEPS.next()
