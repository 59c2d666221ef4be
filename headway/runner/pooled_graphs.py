"""Captured steps that pool; of models that take texts whole by tokens and the longest text, which sizes attention's grid."""

from __future__ import annotations

from collections.abc import Sequence

from headway.runner.launch import LaunchShape
from headway.runner.prefill_graphs import PrefillGraphs
from headway.sampling.sampler import Variant

TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576)
"""Of steps; full ones come after them."""
LONGEST = (32, 128, 512, 2048)
"""Tokens of the longest text; the longest there can be comes after them. Programs without work take time: of 256 rows of up to
512 tokens, when all have 30, seven of eight have none."""
FEW_ROWS, SMALL = 8, 512
"""Steps of up to so many tokens are there for few rows, too: one query alone waits for each microsecond."""
LONG, FULL_ROWS = 128, 2
"""Steps of texts of more tokens are there for as many rows as fill them if the mean is half of the longest, too: a text of 510
tokens fills a 16th of a step, and for 256 rows attention would launch sixteen programs for one that has work."""


def pooled_shapes(max_tokens: int, max_rows: int, max_model_len: int) -> list[LaunchShape]:
    """In order of preference, for all steps of up to ``max_tokens`` x ``max_rows``, of texts of up to ``max_model_len`` tokens.

    Left out is what no step fills beyond the tokens of smaller shapes.
    """
    tiers = [tokens for tokens in TOKENS if tokens < max_tokens] + [max_tokens]
    found = set()
    for below, tokens in zip([0, *tiers], tiers, strict=False):
        most = min(tokens, max_model_len)
        for longest in [each for each in LONGEST if each < most] + [most]:
            fewer = FEW_ROWS if tokens <= SMALL else FULL_ROWS * tokens // longest if longest > LONG else max_rows
            for rows in {min(fewer, max_rows), max_rows}:
                if rows * longest > below:
                    found.add(LaunchShape(tokens, min(rows, tokens), 0, longest))
    return sorted(found, key=lambda shape: (shape.tokens, shape.rows, shape.longest))


class PooledGraphs(PrefillGraphs):
    """Captured steps that pool: each of ``whole`` is one graph, from edits to vectors."""

    def _whole_variants(self, shape: LaunchShape) -> Sequence[Variant]:
        return self._whole
