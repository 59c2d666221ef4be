"""A step in two graphs: its front half (up to the logits), then one of several tails (sampling and slot update).

A tail is a few small kernels, so there can be one for every common mixture of features without capturing the model again.
A mixture takes the first tail that does all it needs: kernels of features that no row uses end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headway.device.base import Device, Graph
from headway.runner.results import Part
from headway.sampling.draw import ALL_PATHS, FILTERED
from headway.sampling.sampler import BIAS_EDIT, Variant
from headway.state.batch import StepBatch

FrontHalf = Callable[[], tuple[StepBatch, torch.Tensor]]
SampleAndAdvance = Callable[[StepBatch, torch.Tensor, Variant], list[Part]]

FEW_LOGPROBS, MOST_LOGPROBS = 5, 20
"""Entries that tails gather. Rows that ask for fewer leave the rest empty; steps that ask for more sample eagerly."""


def tail_variants(every_edit: int) -> list[Variant]:
    """Tails for what has no graph of the whole step, from little to much work. ``every_edit``: all bits of ``edits``."""
    return [
        Variant(flags=ALL_PATHS),
        Variant(every_edit & ~BIAS_EDIT, FILTERED),  # needs no copy of the logits
        Variant(every_edit, FILTERED),
        Variant(every_edit, ALL_PATHS),
        Variant(0, FILTERED, FEW_LOGPROBS),
        Variant(0, ALL_PATHS, MOST_LOGPROBS),
        Variant(every_edit, ALL_PATHS, FEW_LOGPROBS),
        Variant(every_edit, ALL_PATHS, MOST_LOGPROBS),
    ]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replayed step gives beside its records: log-probabilities, laid out as ``variant`` says, or vectors."""

    parts: list[Part]
    variant: Variant


@dataclass(slots=True)
class Tail:
    """A graph to a step's end, and where it leaves the log-probabilities."""

    graph: Graph
    parts: list[Part]

    @classmethod
    def capture(cls, device: Device, body: Callable[[], list[Part]], first: Graph | None = None) -> Tail:
        """Record ``body``, behind ``first``, and keep what it returns: each replay fills the same memory."""
        kept: list[list[Part]] = []
        graph = device.capture(lambda: kept.append(body()), first=first)
        return cls(graph, kept[0])


class SpareLogits:
    """Memory for the logits of steps that no tail fits, shared by all graphs that it is large enough for.

    Graphs write their logits to memory that other graphs use as well; code that is not in a graph needs a copy.
    """

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None

    def like(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] for a copy of ``logits``."""
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = logits.new_empty(len(logits), logits.stride(0))  # what is compiled for one fits the other
        return self._logits[: logits.shape[0], : logits.shape[1]]


class SplitStep:
    """The two halves of a step of fixed (padded) size, captured. All that they run must have run once before.

    Args:
        front: edits, unpack, forward, logits.
        back: sampling and slot update.
        variants: tails to capture, in order of preference.
        whole: variants to capture with the front half in the same graph, preferred to all tails.
        seamless: those of them that record the front half anew, which takes as long as a step without graphs. Behind an
            embedded graph no kernel starts early.
    """

    def __init__(
        self,
        device: Device,
        front: FrontHalf,
        back: SampleAndAdvance,
        variants: Sequence[Variant],
        spare: SpareLogits,
        whole: Sequence[Variant] = (),
        seamless: Collection[Variant] = (),
    ) -> None:
        kept: list[tuple[StepBatch, torch.Tensor]] = []
        self._front = device.capture(lambda: kept.append(front()), reused=bool(whole))
        # The logits' memory stays theirs until all that reads them is captured; graphs captured later may reuse it.
        self._batch, found = kept.pop()
        self._back = back
        with device.main.active():
            self._copy = spare.like(found)
        self._tails = [
            (variant, Tail.capture(device, partial(back, self._batch, found, variant))) for variant in variants
        ]
        self._keep_logits = device.capture(lambda: self._copy.copy_(found))
        self._whole = [
            (variant, Tail.capture(device, partial(back, self._batch, found, variant), self._front))
            if variant not in seamless
            else (variant, Tail.capture(device, partial(_whole_step, front, back, variant)))
            for variant in whole
        ]

    def replay(self, variant: Variant) -> Replayed:
        """Queue the step."""
        found = _covering(self._whole, variant)
        if found is None:
            return self.replay_halves(variant)
        known, step = found
        step.graph.replay()
        return Replayed(step.parts, known)

    def replay_halves(self, variant: Variant) -> Replayed:
        """Queue the step as two graphs, or as one and eager kernels."""
        self._front.replay()
        found = _covering(self._tails, variant)
        if found is None:
            self._keep_logits.replay()
            return Replayed(self._back(self._batch, self._copy, variant), variant)
        known, tail = found
        tail.graph.replay()
        return Replayed(tail.parts, known)


class WholeStep:
    """A step that samples nothing, as one graph."""

    def __init__(self, device: Device, front: FrontHalf, back: SampleAndAdvance) -> None:
        self._tail = Tail.capture(device, partial(_whole_step, front, back, Variant()))

    def replay(self, variant: Variant) -> Replayed:
        """Queue the step, whatever ``variant`` asks of those who sample."""
        self._tail.graph.replay()
        return Replayed(self._tail.parts, Variant())


def _whole_step(front: FrontHalf, back: SampleAndAdvance, variant: Variant) -> list[Part]:
    return back(*front(), variant)


def _covering(steps: Sequence[tuple[Variant, Tail]], variant: Variant) -> tuple[Variant, Tail] | None:
    """The first that does all that ``variant`` needs."""
    return next((pair for pair in steps if pair[0].covers(variant)), None)
