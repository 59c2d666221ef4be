"""CUDA graphs of small steps that hold prompts: launching their kernels one by one takes the host longer than running them.

A ``SplitStep`` for each padded number of tokens and rows. Steps with more tokens take the device long enough to hide launches.
Decode rows in such a step are treated as prompts of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from headway.device.base import Device
from headway.runner.graphs import WHOLE_STEP_VARIANTS, DecodeLogits
from headway.runner.split_step import Replayed, SampleAndAdvance, SpareLogits, SplitStep
from headway.sampling.sampler import Variant

SHAPES = (
    *((tokens, 16) for tokens in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)),
    *((tokens, 128) for tokens in (256, 512, 768, 1024, 1536)),
)
"""(tokens, rows) of the graphs, both padded. The first that holds a step is taken: with few rows, few logits are computed.
The second kind is for a prompt, or a few, that join many rows which decode."""


Shape = tuple[int, int]


class PrefillGraphs:
    """Captured steps with prompts.

    Args:
        prefill_logits: (tokens, rows) -> batch and logits (``ModelRunner.prefill_logits``).
        sample_and_advance: the rest of a step (``ModelRunner``'s).
        shapes: padded (tokens, rows), in order of preference.
        tails: sampling variants of the split steps, besides those that decode steps have whole graphs of.
    """

    def __init__(
        self,
        device: Device,
        prefill_logits: DecodeLogits,
        sample_and_advance: SampleAndAdvance,
        shapes: Iterable[Shape],
        tails: Sequence[Variant],
    ) -> None:
        self._device = device
        self._prefill_logits, self._sample_and_advance = prefill_logits, sample_and_advance
        self.shapes = list(shapes)
        self._tails, self._spare = [*WHOLE_STEP_VARIANTS, *tails], SpareLogits()
        self._split: dict[Shape, SplitStep] = {}

    def capture(self, on_shape: Callable[[Shape], object]) -> None:
        """Capture every shape, largest first; ``on_shape`` draws progress. Needs inference mode and an idle device."""
        for shape in reversed(self.shapes):
            front = partial(self._prefill_logits, *shape)
            self._split[shape] = SplitStep(self._device, front, self._sample_and_advance, self._tails, self._spare)
            on_shape(shape)

    def shape_for(self, num_tokens: int, num_rows: int) -> Shape | None:
        """The first shape that holds the step, or None."""
        return next((shape for shape in self.shapes if shape[0] >= num_tokens and shape[1] >= num_rows), None)

    def replay(self, shape: Shape, variant: Variant) -> Replayed:
        """Queue a step."""
        return self._split[shape].replay(variant)
