"""CUDA graphs of small steps that hold prompts: launching their kernels one by one takes the host longer than running them.

A ``SplitStep`` for each padded number of tokens. Steps with more tokens are long enough on the device to hide their launches.
Decode rows in such a step are treated as prompts of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from headway.device.base import Device
from headway.runner.graphs import WHOLE_STEP_VARIANTS, DecodeLogits
from headway.runner.split_step import Replayed, SampleAndAdvance, SpareLogits, SplitStep
from headway.sampling.sampler import Variant

TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
MAX_ROWS = 16


class PrefillGraphs:
    """Captured steps with prompts.

    Args:
        prefill_logits: (tokens, rows) -> batch and logits (``ModelRunner.prefill_logits``).
        sample_and_advance: the rest of a step (``ModelRunner``'s).
        buckets: ascending padded token counts.
        num_rows: padded rows of each.
        tails: sampling variants of the split steps, besides those that decode steps have whole graphs of.
    """

    def __init__(
        self,
        device: Device,
        prefill_logits: DecodeLogits,
        sample_and_advance: SampleAndAdvance,
        buckets: Iterable[int],
        num_rows: int,
        tails: Sequence[Variant],
    ) -> None:
        self._device = device
        self._prefill_logits, self._sample_and_advance = prefill_logits, sample_and_advance
        self.buckets, self.num_rows = list(buckets), num_rows
        self._tails, self._spare = [*WHOLE_STEP_VARIANTS, *tails], SpareLogits()
        self._split: dict[int, SplitStep] = {}

    def capture(self, on_bucket: Callable[[int], object]) -> None:
        """Capture every bucket, largest first; ``on_bucket`` draws progress. Needs inference mode and an idle device."""
        for bucket in reversed(self.buckets):
            front = partial(self._prefill_logits, bucket, self.num_rows)
            self._split[bucket] = SplitStep(self._device, front, self._sample_and_advance, self._tails, self._spare)
            on_bucket(bucket)

    def bucket_for(self, num_tokens: int, num_rows: int) -> int | None:
        """The smallest bucket that holds the step, or None."""
        if num_rows > self.num_rows:
            return None
        return next((bucket for bucket in self.buckets if bucket >= num_tokens), None)

    def replay(self, bucket: int, variant: Variant) -> Replayed:
        """Queue a step."""
        return self._split[bucket].replay(variant)
