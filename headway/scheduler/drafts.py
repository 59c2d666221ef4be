"""How many guessed tokens were right: counted from results, as the host learns of them."""

from __future__ import annotations

import numpy as np

from headway.core.plan import StepPlan, StepResult


def reached(plan: StepPlan, result: StepResult) -> list[int]:
    """Of each place of a decode row, the rows that brought a token there. In a step with drafts, of rows that have some: others
    say nothing of them. Rows whose request had ended before bring nothing."""
    counts = result.counts[: plan.num_decode_rows]
    if plan.width == 1:
        return [int((counts > 0).sum())]
    counts = counts[plan.query_lens[: plan.num_decode_rows] > 1]
    return (counts[:, None] > np.arange(plan.width)).sum(0).tolist()


class DraftCounts:
    """Drafts of rows that were verified.

    Args:
        width: most tokens of a decode row.

    Attributes:
        rows: rows with drafts that brought a token.
        drafted: their drafts.
    """

    def __init__(self, width: int) -> None:
        self.rows = self.drafted = 0
        self._accepted = np.zeros(width - 1, np.int64)

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step. Rows whose request had ended before bring nothing and count for nothing."""
        if plan.width == 1:
            return
        rows, *accepted = reached(plan, result)
        self.rows += rows
        self.drafted += rows * len(accepted)
        self._accepted[: len(accepted)] += accepted

    @property
    def accepted(self) -> int:
        """Drafts that became tokens."""
        return int(self._accepted.sum())

    @property
    def accepted_per_position(self) -> list[int]:
        """Of first drafts, of second ones, and so on."""
        return self._accepted.tolist()
