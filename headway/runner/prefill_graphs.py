"""CUDA graphs of small steps that hold prompts: launching their kernels one by one takes the host longer than running them.

A graph covers unpack, forward and logits for a padded number of tokens and rows; sampling follows eagerly. Steps with more
tokens are long enough on the device to hide their launches. Decode rows in such a step are treated as prompts of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headway.device.base import Device
from headway.runner.graphs import DecodeLogits, FrontHalf

TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
MAX_ROWS = 16


class PrefillGraphs:
    """Captured front halves of steps with prompts.

    Args:
        prefill_logits: (tokens, rows) -> batch and logits (``ModelRunner.prefill_logits``).
        buckets: ascending padded token counts.
        num_rows: padded rows of each.
    """

    def __init__(self, device: Device, prefill_logits: DecodeLogits, buckets: Iterable[int], num_rows: int) -> None:
        self._device, self._prefill_logits = device, prefill_logits
        self.buckets, self.num_rows = list(buckets), num_rows
        self._front: dict[int, FrontHalf] = {}

    def capture(self, on_bucket: Callable[[int], object]) -> None:
        """Capture every bucket, largest first; ``on_bucket`` draws progress. Needs inference mode and an idle device."""
        for bucket in reversed(self.buckets):
            with self._device.main.active():  # kernels compile outside of a capture
                self._prefill_logits(bucket, self.num_rows)
            self._front[bucket] = FrontHalf.capture(self._device, partial(self._prefill_logits, bucket, self.num_rows))
            on_bucket(bucket)

    def bucket_for(self, num_tokens: int, num_rows: int) -> int | None:
        """The smallest bucket that holds the step, or None."""
        if num_rows > self.num_rows:
            return None
        return next((bucket for bucket in self.buckets if bucket >= num_tokens), None)

    def replay(self, bucket: int) -> FrontHalf:
        """Queue the front half of a step; returns where its batch and logits are."""
        front = self._front[bucket]
        front.graph.replay()
        return front
