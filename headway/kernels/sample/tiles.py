"""How the kernels of ``sample`` cut their work. Imports no Triton.

No tile changes a token: rows are cut alike whoever shares the batch wherever a sum depends on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.ints import next_power_of_2


@dataclass(frozen=True, slots=True)
class SampleTile:
    """One way to cut the rows.

    Attributes:
        block: logits per program of the first kernel.
        num_warps: of the first kernel.
        part: logits whose maximum and mass the first kernel notes for filtered rows; divides ``block``.
        gather: logits per pass when the second kernel collects candidates.
        small, large: candidates that it searches in registers; it tries the small size first.
        finish_warps: of the second kernel.
        pivots: thresholds it tries per pass over a row with too many candidates.
    """

    block: int
    num_warps: int
    part: int = 128
    gather: int = 2048
    small: int = 512
    large: int = 4096
    finish_warps: int = 8
    pivots: int = 8


FILTERED = SampleTile(block=2048, num_warps=4)
"""The same at every number of rows: the parts' sums, and with them tokens, depend on it."""


def tile_for(rows: int, vocab: int, filtered: bool) -> SampleTile:
    """The tile for ``rows`` rows of ``vocab`` logits; ``filtered``: some row may use top_k, top_p or min_p."""
    if filtered:
        return FILTERED
    # An argmax does not care how the row is cut: few rows need small blocks to fill the GPU, many rows large ones.
    block = min(1024 if rows < 32 else 4096, max(128, next_power_of_2(vocab)))
    return SampleTile(block=block, num_warps=4 if block <= 1024 else 8)
