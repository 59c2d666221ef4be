"""CUDA graphs of decode steps: one launch replays edits, unpack, forward, logits, sampling and slot update.

For each padded row count there is a graph of the whole step for each of the most common sampling variants (up to
``LOGPROB_ROWS`` rows also one with log-probabilities), and two graphs, the front half and a tail, for others (``SplitStep``).
Variants are chosen from host facts only. Everything a graph reads has a stable address: the packed step, the slot tables, the
batch buffers, the KV pool, the result ring (its index is data, not an argument).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from headway.device.base import Device
from headway.kernels.sample import RANDOM
from headway.runner.launch import LaunchShape
from headway.runner.split_step import FEW_LOGPROBS, Replayed, SampleAndAdvance, SpareLogits, SplitStep, WholeStep
from headway.sampling.draw import FILTERED
from headway.sampling.sampler import GRAMMAR_EDIT, Variant
from headway.state.batch import StepBatch

WHOLE_STEP_VARIANTS = (
    Variant(),
    Variant(flags=RANDOM),
    Variant(flags=FILTERED),
    Variant(GRAMMAR_EDIT, RANDOM),
    Variant(GRAMMAR_EDIT, FILTERED),
)
"""Sampling variants with a graph of the whole step: greedy, random, random with top-k/top-p/min-p or any with penalties; the
latter two with grammars. From few to many flags: a step takes the first that does all it needs."""

WITH_LOGPROBS = Variant(0, FILTERED, FEW_LOGPROBS)
LOGPROB_ROWS = 64
"""Of steps up to so many rows there is a whole graph of ``WITH_LOGPROBS``, too: the gap between two graphs is 2 % of such a
step."""

SEAMLESS_ROWS = 64
"""Up to so many rows, whole graphs of steps with grammars are seamless (``SplitStep``): the mask looks up what a row may write
beside the output layer, not behind it."""

StepLogits = Callable[[LaunchShape], tuple[StepBatch, torch.Tensor]]
"""The front half of a step of a shape."""


def row_buckets(max_num_seqs: int) -> list[int]:
    """Padded row counts: 1, 2, 4, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the largest is ``max_num_seqs``.

    Attention has nothing to do for padding and products come in tiles of 64 rows, while a bucket costs a start 27 to 33 ms.
    """
    buckets = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32), max_num_seqs}
    return sorted(bucket for bucket in buckets if bucket <= max_num_seqs)


def few_buckets(max_num_seqs: int) -> list[int]:
    """Powers of two and ``max_num_seqs``, for kinds of steps that are rarer: a third of the buckets, and of what they cost."""
    return sorted({1 << bit for bit in range(max_num_seqs.bit_length())} | {max_num_seqs})


def decode_shapes(max_num_seqs: int, widths: Sequence[int]) -> list[LaunchShape]:
    """Of all decode steps, from small to large. Rows with some but not all drafts come in ``few_buckets``."""
    usual, few = row_buckets(max_num_seqs), few_buckets(max_num_seqs)
    found = {(rows, width) for width in widths for rows in (usual if width in (1, widths[-1]) else few)}
    return [decode_shape(*each) for each in sorted(found)]


def decode_shape(num_rows: int, width: int = 1) -> LaunchShape:
    """The key of a graph of ``num_rows`` decode rows of ``width`` tokens."""
    return LaunchShape(num_rows * width, num_rows, num_rows, width, width)


class StepGraphs:
    """Captured steps: a ``SplitStep`` for each of some shapes, which are their keys.

    Args:
        front, back: the two halves of a step (``StepBody``'s).
        shapes: what to call ``front`` with, from small to large.
        tails: sampling variants of the split steps.
        hands_on: steps sample nothing, since a later stage does: each shape has one graph.
    """

    def __init__(
        self,
        device: Device,
        front: StepLogits,
        back: SampleAndAdvance,
        shapes: Iterable[LaunchShape],
        tails: Sequence[Variant],
        *,
        hands_on: bool = False,
    ) -> None:
        self._device, self._front, self._back, self._hands_on = device, front, back, hands_on
        self.shapes = list(shapes)
        self._tails, self._spare = tails, SpareLogits()
        self._split: dict[LaunchShape, SplitStep | WholeStep] = {}

    def rehearse(self, others: Sequence[Variant], *, sampling: bool = True) -> None:
        """Run shapes, and every variant: nothing compiles or loads inside a capture.

        Args:
            others: variants that no graph is for.
            sampling: False: the front halves alone.

        What chooses a sampling kernel's sizes are thresholds and powers of two of rows, so variants run for those only. Needs
        inference mode and the main stream.
        """
        drawn = () if self._hands_on else (*self._tails, *others)
        variants = dict.fromkeys((*WHOLE_STEP_VARIANTS, *drawn) if sampling else ())
        sampled: set[int] = set()
        for shape in reversed(self.shapes):  # from large to small
            batch, logits = self._front(shape)
            rows = shape.rows
            if rows in sampled or (sampled and rows.bit_count() > 1):
                continue
            sampled.add(rows)
            for variant in variants:
                self._back(batch, logits, variant)

    def capture(self, on_shape: Callable[[LaunchShape], object]) -> None:
        """Capture every shape, largest first so that the shared pool is sized once; ``on_shape`` draws progress.

        Needs a rehearsal, inference mode and an idle device.
        """
        for shape in reversed(self.shapes):
            self._capture(shape)
            on_shape(shape)

    def replay(self, shape: LaunchShape, variant: Variant) -> Replayed:
        """Queue a step of a captured shape."""
        return self._split[shape].replay(variant)

    def _capture(self, shape: LaunchShape) -> None:
        front = partial(self._front, shape)
        if self._hands_on:
            self._split[shape] = WholeStep(self._device, front, self._back)
            return
        whole = self._whole_variants(shape)
        seamless = [variant for variant in whole if variant.edits & GRAMMAR_EDIT and shape.rows <= SEAMLESS_ROWS]
        self._split[shape] = SplitStep(
            self._device, front, self._back, self._tail_variants(shape), self._spare, whole, seamless
        )

    def _whole_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        """Variants with a graph of the whole step, in order of preference."""
        return ()

    def _tail_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        """Variants with a tail, in order of preference."""
        return self._tails


class DecodeGraphs(StepGraphs):
    """Captured decode steps.

    Args:
        shapes: of ``decode_shapes``; a shape's graphs apply as many edits of slots as it has rows.
    """

    def _whole_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        return (*WHOLE_STEP_VARIANTS, WITH_LOGPROBS) if shape.rows <= LOGPROB_ROWS else WHOLE_STEP_VARIANTS

    def shape_for(self, num_rows: int, num_edits: int, width: int = 1) -> LaunchShape | None:
        """The smallest shape that holds the rows, or None. A shape's graph applies at most as many edits as it has rows."""
        for shape in self.shapes:
            if shape.rows >= num_rows and shape.rows >= num_edits and shape.width == width:
                return shape
        return None
