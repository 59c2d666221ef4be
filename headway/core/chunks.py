"""The chunk table: how rows of several tokens are dealt out to programs of kernels that keep states.

The host computes it once per step from query lengths, and it travels in the packed step: no layer derives it again,
and none has to ask the device for a length.
"""

from __future__ import annotations

import numpy as np

from headway.core.plan import Int32s

CHUNK = 64
"""Tokens of a chunk: what one program takes at once."""
CHUNKS_AT = 7
"""Where the packed step's header says where the table is; the number of its entries follows."""
LOADS_AT, SAVES_AT = 9, 11
"""Likewise of (source, destination) slots of states that are copied before the forward pass, and behind it."""


def chunk_table(query_lens: Int32s, short: int = 1) -> Int32s:
    """(row, n-th chunk) of every chunk of the rows with more than ``short`` tokens, int32 [2 NT]; rows rise, and chunks
    within them.

    The lengths are the host's own, so they are exact. Rows of drafts are short: one program takes all of their tokens.
    """
    counts = np.where(query_lens > short, -(-query_lens // CHUNK), 0)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts) - counts
    table = np.empty((len(rows), 2), np.int32)
    table[:, 0], table[:, 1] = rows, np.arange(len(rows)) - firsts[rows]
    return table.reshape(-1)


def most_chunks(tokens: int, rows: int, longest: int, short: int = 1) -> int:
    """A bound on the entries of the chunk table of a step of up to so many tokens and rows of up to ``longest``."""
    return 0 if longest <= short else min(tokens // CHUNK + rows, tokens)


def ring_places(write_back: int, width: int) -> int:
    """Places of the ring of a recurrent state's inputs that is written back at most once in ``write_back`` tokens, where rows
    have up to ``width``.

    A row needs a place for each token since the state was stored, its own included, and it must be known beforehand that the
    next row has them, too; of a row that stores the state only the first token is certain.
    """
    return write_back + 2 * (width - 1)
