"""CUDA graphs of small steps that hold prompts: launching their kernels one by one takes the host longer than running them.

A ``SplitStep`` for each padded number of tokens and rows. Steps with more tokens take the device long enough to hide launches.
Decode rows in such a step are treated as prompts of one token.
"""

from __future__ import annotations

from headway.runner.graphs import Shape, StepGraphs
from headway.runner.split_step import Replayed
from headway.sampling.sampler import Variant

SHAPES = (
    *((tokens, 16) for tokens in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)),
    *((tokens, 128) for tokens in (256, 512, 768, 1024, 1536)),
)
"""(tokens, rows) of the graphs, both padded. The first that holds a step is taken: with few rows, few logits are computed.
The second kind is for a prompt, or a few, that join many rows which decode."""


_NEWCOMERS, _EDITS_EACH, _BLOCK_TOKENS = 16, 24, 16


def max_edits(num_tokens: int, num_rows: int) -> int:
    """Edits of slots that the graph of a shape applies: newcomers' without prefix hits or long tables, each block one."""
    return _EDITS_EACH * min(num_rows, _NEWCOMERS) + num_tokens // _BLOCK_TOKENS


class PrefillGraphs(StepGraphs):
    """Captured steps with prompts, of (tokens, rows) in order of preference."""

    def shape_for(self, num_tokens: int, num_rows: int) -> Shape | None:
        """The first shape that holds the step, or None."""
        return next((shape for shape in self.shapes if shape[0] >= num_tokens and shape[1] >= num_rows), None)

    def replay(self, shape: Shape, variant: Variant) -> Replayed:
        """Queue a step."""
        return self._split[shape].replay(variant)
