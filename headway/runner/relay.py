"""A stage that draws no tokens: it hands hidden states on, and learns later what the last stage drew.

Its slots need the tokens only when their rows come again. So it goes on with other rows meanwhile, which is what fills the
pipe: the leader says with each step how many of the latest steps' tokens it can do without (``Launch.unsettled``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headway.parallel.stage import Stage
from headway.sampling.sampler import Variant
from headway.state.batch import StepBatch
from headway.state.packed_step import ROW_INTS, ROWS_AT

if TYPE_CHECKING:
    from headway.runner.step_body import StepBody


@dataclass(slots=True)
class _Step:
    """A step whose tokens are not known yet.

    Attributes:
        packed: int32, the packed step as far as its rows, which later steps overwrite.
        slots: int32 [R], of its rows that draw; -1 for others.
        tokens: int32 [R] for each outcome that a row can have, filled when the last stage has drawn them.
        batch: the step's, whose tensors are later ones' by then.
    """

    packed: torch.Tensor
    slots: torch.Tensor
    tokens: list[torch.Tensor]
    variant: Variant
    batch: StepBatch


class Relay:
    """What a stage that draws no tokens still has to learn."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._waiting: deque[_Step] = deque()

    def settle(self, body: StepBody, unsettled: int) -> None:
        """Wait, on the device, for the tokens of all steps but the latest ``unsettled``, and move their slots on."""
        while len(self._waiting) > unsettled:
            step = self._waiting.popleft()
            slots = step.slots
            for offset, tokens in enumerate(step.tokens):
                self._stage.heard(tokens)
                slots = body.advance(slots, tokens, step.variant, step.packed, offset, len(step.tokens))
            body.draft(replace(step.batch, row_slots=step.slots), step.variant)

    def note(self, body: StepBody, batch: StepBatch, variant: Variant) -> None:
        """A step has been handed on. Rows that draw nothing, the chunks of prompts, move on at once."""
        rows = len(batch.row_slots)
        packed = body.packed[: ROWS_AT + ROW_INTS * rows].clone()
        draws = packed[ROWS_AT:].view(rows, ROW_INTS)[:, 3] > 0
        nobody = torch.full_like(batch.row_slots, -1)
        body.advance(torch.where(draws, nobody, batch.row_slots), nobody, variant, packed, 0, 1)
        slots = torch.where(draws, batch.row_slots, nobody)
        tokens = [torch.empty_like(nobody) for _ in range(batch.width)]
        for each in tokens:
            self._stage.listen(each)
        self._waiting.append(_Step(packed, slots, tokens, variant, batch))
