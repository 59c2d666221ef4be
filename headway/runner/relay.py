"""A stage that draws no tokens: it hands hidden states on, and learns later what the last stage drew, and guesses next.

Its slots need the tokens only when their rows come again. So it goes on with other rows meanwhile, which is what fills the
pipe: the leader says with each step how many of the latest steps' tokens it can do without (``Launch.unsettled``).

What a step leaves for later, and what comes for it, is kept in one buffer of its own. For decode steps there are graphs of what
is done with it, which read one and the same buffer: the step's is copied there first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from headway.core.ints import round_up
from headway.device.base import Device, Graph
from headway.parallel.stage import Stage
from headway.runner.launch import LaunchShape
from headway.sampling.sampler import GRAMMAR_EDIT, Variant
from headway.state.batch import StepBatch
from headway.state.packed_step import ROW_INTS, ROWS_AT

if TYPE_CHECKING:
    from headway.runner.step_body import StepBody

_VARIANTS = (Variant(), Variant(GRAMMAR_EDIT))
"""All that makes a difference to what is done with tokens."""


@dataclass(slots=True)
class _Step:
    """A step whose tokens are not known yet.

    Attributes:
        kept: int32, see ``_Kept``.
        shape: padding included.
    """

    kept: torch.Tensor
    shape: LaunchShape
    variant: Variant


class _Kept:
    """Where things lie in what a step leaves: the packed step as far as its rows, the rows' slots, the tokens of each outcome
    that a row can have, and the drafts of the next step, all in rows of ``stride``."""

    def __init__(self, shape: LaunchShape, most: int) -> None:
        self.stride = round_up(shape.rows, 4)  # kernels are specialised on multiples of 16 bytes
        self.packed = ROWS_AT + ROW_INTS * self.stride
        self.tokens = self.packed + self.stride
        self.size = self.tokens + num_told(shape.width, most) * self.stride


class Relay:
    """What a stage that draws no tokens still has to learn; ``width``: most tokens of a decode row."""

    def __init__(self, stage: Stage, width: int) -> None:
        self._stage, self._width = stage, width
        self._waiting: deque[_Step] = deque()
        self._graphs: dict[tuple[LaunchShape, int], Graph] = {}
        self._read: torch.Tensor | None = None  # by the graphs

    def _places(self, shape: LaunchShape) -> _Kept:
        return _Kept(shape, self._width)

    def settle(self, body: StepBody, unsettled: int) -> None:
        """Wait, on the device, for the tokens of all steps but the latest ``unsettled``, and move their slots on."""
        while len(self._waiting) > unsettled:
            step = self._waiting.popleft()
            self._stage.heard(step.kept[self._places(step.shape).tokens :])
            graph = self._graphs.get((step.shape, step.variant.edits & GRAMMAR_EDIT))
            if graph is None:
                self._move_on(body, step.kept, step.shape, step.variant)
            else:
                assert self._read is not None
                self._read[: len(step.kept)].copy_(step.kept)
                graph.replay()

    def note(self, body: StepBody, shape: LaunchShape, variant: Variant) -> None:
        """A step of ``shape``, padding included, has been handed on."""
        places = self._places(shape)
        kept = body.packed.new_empty(places.size)
        torch.cat((body.packed[: places.packed], body.row_slots(places.stride)), out=kept[: places.tokens])
        self._stage.listen(kept[places.tokens :])
        self._waiting.append(_Step(kept, shape, variant))

    def pass_chunks(self, body: StepBody, batch: StepBatch) -> None:
        """Rows that draw nothing, the chunks of prompts, move on at once."""
        draws = _draws(body.packed, len(batch.row_slots))
        nobody = torch.full_like(batch.row_slots, -1)
        body.advance(torch.where(draws, nobody, batch.row_slots), nobody, Variant(), body.packed, 0, 1)

    def rehearse(self, body: StepBody, shapes: Sequence[LaunchShape]) -> None:
        """Run what ``capture`` captures, with no rows."""
        nothing = self._empty(body, shapes)
        for shape, variant in _kinds(shapes):
            self._move_on(body, nothing[: self._places(shape).size], shape, variant)

    def capture(self, device: Device, body: StepBody, shapes: Sequence[LaunchShape]) -> None:
        """Capture what is done with the tokens of decode steps. Needs a rehearsal, inference mode and an idle device."""
        with device.main.active():
            self._read = self._empty(body, shapes)
        for shape, variant in _kinds(shapes):
            kept = self._read[: self._places(shape).size]
            self._graphs[shape, variant.edits] = device.capture(partial(self._move_on, body, kept, shape, variant))

    def _empty(self, body: StepBody, shapes: Sequence[LaunchShape]) -> torch.Tensor:
        """What steps without rows leave, for the largest of ``shapes``."""
        return body.packed.new_full((max((self._places(shape).size for shape in shapes), default=0),), -1)

    def _move_on(self, body: StepBody, kept: torch.Tensor, shape: LaunchShape, variant: Variant) -> None:
        """Move the slots of a step on by its tokens, and keep what was guessed for the next one."""
        places, rows = self._places(shape), shape.rows
        packed = kept[: places.packed]
        owners, *told = (each[:rows] for each in kept[places.packed :].view(-1, places.stride).unbind())
        tokens, drafts = told[: shape.width], told[shape.width :]
        slots = owners
        if not shape.only_decode:
            slots = torch.where(_draws(packed, rows), slots, -1)
        going = slots
        for offset, drawn in enumerate(tokens):
            going = body.advance(going, drawn, variant, packed, offset, shape.width)
        # Of all rows, also those that drew nothing: the table is the last stage's, whatever a later step reads of it.
        body.take_drafts(owners, drafts)


def num_told(width: int, most: int) -> int:
    """Rows of what is told of a step: tokens of ``width`` outcomes, and with any drafts as many as rows of ``most`` tokens
    have."""
    return width + (most - 1 if width > 1 else 0)


def _kinds(shapes: Sequence[LaunchShape]) -> Iterator[tuple[LaunchShape, Variant]]:
    """From large to small, so that the shared pool is sized once."""
    return ((shape, variant) for shape in reversed(shapes) for variant in _VARIANTS)


def _draws(packed: torch.Tensor, rows: int) -> torch.Tensor:
    """bool [R], whether the rows of a packed step bring tokens."""
    return packed[ROWS_AT : ROWS_AT + ROW_INTS * rows].view(rows, ROW_INTS)[:, 3] > 0
