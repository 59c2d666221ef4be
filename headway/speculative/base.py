"""What the runner asks of a drafter."""

from __future__ import annotations

import torch

from headway.state.batch import StepBatch


class Drafter:
    """Guesses tokens, on the device alone. Captured in the graph of the step whose tokens it follows."""

    def propose(self, batch: StepBatch) -> None:
        """Fill ``drafts[slot]`` of the batch's slots (the core table, int32 [S, K]) with the tokens that may follow the known
        ones. Runs at the end of every step, when the step's tokens are in the slots' histories. A row that has ended may get
        anything.
        """
        raise NotImplementedError

    def judge(self, token_ids: torch.Tensor, slots: torch.Tensor, offset: int) -> None:
        """May replace the drawn tokens, int32 [R], of outcome ``offset`` of ``slots`` (int32 [R], -1: none) before they are
        compared with the drafts. Only benchmarks do."""
