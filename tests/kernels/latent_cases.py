"""Inputs of the kernels of latent attention: rows of every kind over a cache whose unowned places hold NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.kernels.registry import Op
from headway.kernels.testing import interpreter_loops, make_paged_inputs, make_random

SHORT = 3
"""Most tokens of a short row in these tests."""
ROWS = [(1, 37), (1, 0), (2, 21), (9, 9), (3, 3), (1, 1), (17, 40), (4, 0), (3, 64), (5, 30)]
"""(tokens, context with them); context 0 makes a zombie."""


@dataclass(frozen=True)
class Sizes:
    """Heads, elements of a query that are not rotated and that are, of a value, of a latent; of a block."""

    heads: int
    nope: int
    rotated: int
    value: int
    rank: int
    block: int = 8


SIZES = [Sizes(4, 12, 8, 10, 20), Sizes(5, 16, 16, 24, 32, 16), Sizes(70, 16, 4, 16, 24)]


@dataclass
class Scene:
    """Tensors of a step, as the operations name them."""

    sizes: Sizes
    q: torch.Tensor
    q_latent: torch.Tensor
    latents: torch.Tensor
    block_tables: torch.Tensor
    row_slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    bound: int

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.block_tables, self.row_slots, self.query_start, self.seq_lens

    @property
    def prefix(self) -> int:
        """Tokens of the contexts of rows that are not short."""
        counts = self.query_start[1:] - self.query_start[:-1]
        return int(torch.where((counts > SHORT) & (self.seq_lens > 0), self.seq_lens - counts, 0).sum())


def scene(
    sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, rows: Sequence[tuple[int, int]] = ROWS,
    cached: torch.dtype | None = None, pads: tuple[int, int] = (2, 5), bound: int = 70,
) -> Scene:  # fmt: skip
    """``pads``: rows and tokens of padding; ``bound``: of the contexts."""
    made = make_paged_inputs(
        rows, num_decode_rows=0, heads=(1, 1), size=sizes.rank + sizes.rotated, block_size=sizes.block, dtype=dtype,
        device=device, pad_rows=pads[0], pad_tokens=pads[1], bound=bound, cached=cached,
    )  # fmt: skip
    tokens = len(made.q)
    return Scene(
        sizes,
        make_random(tokens, sizes.heads, sizes.nope + sizes.rotated, dtype=dtype, device=device, seed=11),
        make_random(tokens, sizes.heads, sizes.rank, dtype=dtype, device=device, seed=12),
        made.k_cache[:, :, 0],
        made.block_tables,
        made.row_slots,
        made.query_start,
        made.seq_lens,
        made.max_query_len,
        made.max_seq_len_bound,
    )


def on(implementation: Callable[..., Any], *arguments: Any) -> Any:
    """Run it on copies; gives what it returned, or the tensors if it returns nothing."""
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    with interpreter_loops():
        result = implementation(*copies)
    return copies if result is None else result


def kernel(op: Op) -> Callable[..., Any]:
    """The Triton implementation."""
    return op.implementation("cuda")


def tokens_of(made: Scene, wanted: Callable[[int, int], bool], nobodys: bool = False) -> torch.Tensor:
    """int64, tokens of the rows of which (tokens, context) are ``wanted``; with ``nobodys`` those of no row, too."""
    starts, lens = made.query_start.tolist(), made.seq_lens.tolist()
    found = [
        t
        for r in range(len(lens))
        if wanted(starts[r + 1] - starts[r], lens[r])
        for t in range(starts[r], starts[r + 1])
    ]
    return torch.tensor(found + (list(range(starts[-1], len(made.q))) if nobodys else []), device=made.q.device)
