"""CUDA graphs of decode steps: one launch replays edits, unpack, forward, logits, sampling and slot update.

For each padded row count there is one graph of the whole step for each of the most common sampling variants, and a
``SplitStep`` for all others. Variants are chosen from host facts only. Everything a graph reads has a stable address: the
packed step, the slot tables, the batch buffers, the KV pool, the result ring (its index is data, not an argument).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from headway.device.base import Device, Graph
from headway.kernels.sample import RANDOM
from headway.runner.split_step import Replayed, SampleAndAdvance, SpareLogits, SplitStep
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
"""Sampling variants with a graph of the whole step: greedy, random, random with top-k/top-p/min-p; the latter two with
grammars. From few to many flags: a step takes the first that does all it needs."""

DecodeLogits = Callable[[int, int], tuple[StepBatch, torch.Tensor]]


def row_buckets(max_num_seqs: int) -> list[int]:
    """Padded row counts: 1, 2, 4, then steps of 8 up to 256, of 16 beyond; the largest is ``max_num_seqs``."""
    buckets = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(bucket for bucket in buckets if bucket <= max_num_seqs)


class DecodeGraphs:
    """Captured decode steps.

    Args:
        decode_logits, sample_and_advance: the two halves of a step (``ModelRunner``'s).
        buckets: ascending padded row counts.
        tails: variants of the split steps.
    """

    def __init__(
        self,
        device: Device,
        decode_logits: DecodeLogits,
        sample_and_advance: SampleAndAdvance,
        buckets: Iterable[int],
        tails: Sequence[Variant],
    ) -> None:
        self._device = device
        self._decode_logits, self._sample_and_advance = decode_logits, sample_and_advance
        self.buckets = list(buckets)
        self._tails, self._spare = tails, SpareLogits()
        self._split: dict[int, SplitStep] = {}
        self._whole: dict[tuple[int, Variant], Graph] = {}

    def capture(self, on_bucket: Callable[[int], object]) -> None:
        """Capture every bucket, largest first so that the shared pool is sized once; ``on_bucket`` draws progress.

        Needs inference mode and an idle device.
        """
        for bucket in reversed(self.buckets):
            front = partial(self._decode_logits, bucket, bucket)
            self._split[bucket] = SplitStep(
                self._device, front, self._sample_and_advance, self._tails, self._spare, others=WHOLE_STEP_VARIANTS
            )
            for variant in WHOLE_STEP_VARIANTS:
                self._whole[bucket, variant] = self._capture_whole(bucket, variant)
            on_bucket(bucket)

    def _capture_whole(self, bucket: int, variant: Variant) -> Graph:
        def body() -> None:
            batch, logits = self._decode_logits(bucket, bucket)
            self._sample_and_advance(batch, logits, variant)

        return self._device.capture(body)

    def bucket_for(self, num_rows: int, num_edits: int) -> int | None:
        """The smallest bucket that holds the rows, or None. A bucket's graph applies at most as many edits as it has rows."""
        for bucket in self.buckets:
            if bucket >= num_rows and bucket >= num_edits:
                return bucket
        return None

    def replay(self, bucket: int, variant: Variant) -> Replayed:
        """Queue a decode step."""
        covering = next((known for known in WHOLE_STEP_VARIANTS if known.covers(variant)), None)
        if covering is not None:
            self._whole[bucket, covering].replay()
            return Replayed([], covering)
        return self._split[bucket].replay(variant)
