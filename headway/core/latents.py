"""Which rows of a step attend to latents themselves, and which to keys and values made from them.

Latent attention (DeepSeek-AI 2024) can multiply its queries into the space of the latents ("absorbed"), or make keys and
values of the latents ("expanded"). The first reads the least memory and does three times the arithmetic, so it is for rows of
few tokens. A row of many tokens makes keys and values of its own tokens and, piece by piece, of its context; how many pieces
there are, the host must know, so the runner and the attention share these rules.
"""

from __future__ import annotations

SHORT_ROW = 16
"""Tokens up to which a row attends to latents."""
SMALL_STEP = 256
"""Tokens of steps in which all rows do, if they have no more than ``SMALL_STEP_ROWS``."""
SMALL_STEP_ROWS = 16


def short_row(width: int) -> int:
    """Most tokens of a row that attends to latents in a step whose decode rows have ``width`` tokens."""
    return max(SHORT_ROW, width)


def absorbs_all(num_tokens: int, num_rows: int, max_query_len: int, width: int) -> bool:
    """Whether all rows of a step attend to latents; the numbers are the step's, or those it is padded to."""
    few = num_tokens <= SMALL_STEP and num_rows <= SMALL_STEP_ROWS
    return few or max_query_len <= short_row(width)
