"""How many guessed tokens were right: counted from results, as the host learns of them."""

from __future__ import annotations

import numpy as np

from headway.core.plan import Int32s, StepPlan, StepResult


def drafted_counts(plan: StepPlan, result: StepResult) -> Int32s:
    """int32 [n], tokens that rows with drafts brought, without rows whose request had ended before."""
    counts = result.counts[: plan.num_decode_rows]
    return counts[(counts > 0) & (plan.query_lens[: plan.num_decode_rows] > 1)]


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
        brought = drafted_counts(plan, result)
        self.rows += len(brought)
        self.drafted += len(brought) * (plan.width - 1)
        places = np.arange(1, plan.width)
        self._accepted[: plan.width - 1] += (brought[:, None] > places).sum(0)

    @property
    def accepted(self) -> int:
        """Drafts that became tokens."""
        return int(self._accepted.sum())

    @property
    def accepted_per_position(self) -> list[int]:
        """Of first drafts, of second ones, and so on."""
        return self._accepted.tolist()
