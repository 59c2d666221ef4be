"""CUDA graphs of steps that hold prompts: launching their kernels one by one takes the host as long as running them, or longer.

A ``SplitStep`` for each padded number of tokens and rows: of small steps, and of full ones, which are what many prompts or a
long one make. Between the two, steps take the device long enough to hide launches, and padding would cost too much. Decode
rows in such a step are treated as prompts of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.runner.graphs import WHOLE_STEP_VARIANTS, Shape, StepGraphs
from headway.sampling.sampler import Variant

FEW_ROWS = 16
SMALL = (
    *((tokens, FEW_ROWS) for tokens in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)),
    *((tokens, 128) for tokens in (256, 512, 768, 1024, 1536)),
)
"""(tokens, rows) of small steps, both padded. The first that holds a step is taken: with few rows, few logits are computed.
The second kind is for a prompt, or a few, that join many rows which decode."""
LARGEST_SMALL = 1536
"""Tokens up to which a step may be padded to any size."""
FULL_ROWS = (16, 8, 4, 2)
"""Rows of full steps. Their product with the longest prompt in the step is bounded: it sizes the grid of the attention, whose
programs without work would take time."""
LEAST_FULL = 15 / 16
"""Share of a full step's tokens from which on it is padded to a full one."""


def prefill_shapes(max_tokens: int, max_rows: int) -> list[Shape]:
    """(tokens, rows, most tokens of a row) in order of preference, for steps of up to ``max_tokens`` x ``max_rows``."""
    shapes = [(tokens, min(rows, max_rows), tokens) for tokens, rows in SMALL if tokens <= max_tokens]
    if max_tokens > LARGEST_SMALL:
        shapes += [(max_tokens, min(rows, max_rows), 2 * max_tokens // rows) for rows in FULL_ROWS]
    return list(dict.fromkeys(shapes))


_NEWCOMERS, _EDITS_EACH, _BLOCK_TOKENS = 16, 24, 16


def max_edits(num_tokens: int, num_rows: int) -> int:
    """Edits of slots that the graph of a shape applies: newcomers' without prefix hits or long tables, each block one."""
    return _EDITS_EACH * min(num_rows, _NEWCOMERS) + num_tokens // _BLOCK_TOKENS


class PrefillGraphs(StepGraphs):
    """Captured steps with prompts, of ``prefill_shapes``."""

    def shape_for(self, num_tokens: int, num_rows: int, max_query_len: int) -> Shape | None:
        """The first shape that holds the step without much padding, or None."""
        for shape in self.shapes:
            tokens, rows, longest = shape
            if num_tokens <= tokens and num_rows <= rows and max_query_len <= longest:
                return shape if tokens <= LARGEST_SMALL or num_tokens >= LEAST_FULL * tokens else None
        return None

    def _whole_variants(self, shape: Shape) -> Sequence[Variant]:
        """Greedy and random steps of the first kind: a lone prompt waits for the gap between two graphs."""
        tokens, rows, _ = shape
        return WHOLE_STEP_VARIANTS[:2] if tokens <= LARGEST_SMALL and rows <= FEW_ROWS else ()

    def _rehearsed(self) -> list[Shape]:
        """Full steps differ in what sizes their grids alone: one of them will do."""
        full = [shape for shape in self.shapes if shape[0] > LARGEST_SMALL]
        return [shape for shape in super()._rehearsed() if shape not in full[1:]]
