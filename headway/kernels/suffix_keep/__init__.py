"""``suffix_keep``: keeps the answers of requests that end, for ``suffix_draft`` to look others' texts up in.

suffix_keep(Tensor(a!) store, Tensor(b!) cursor, Tensor row_slots, Tensor seq_lens, Tensor scope, Tensor alive, Tensor history,
            Tensor prompt_len, Tensor num_tokens) -> ()

    store       int32 [T], T >= 4, a ring of tokens          cursor  int64 [2 + C], C >= 1: tokens ever written, answers ever
                kept, and where answer i began, counted in tokens ever written, at 2 + i mod C
    row_slots   int32 [R]       seq_lens  int32 [R], 0 where the row's request had ended before the step
    scope, alive, prompt_len, num_tokens  int32 [S]           history  int32 [S, L]

A row ends when seq_lens > 0, its slot is in the table, and alive is 0 now; it is kept when its scope is SHARED and its answer,
tokens prompt_len .. num_tokens - 1, has any. Of each kept row, in order of rows, the last T // 2 - 1 tokens of the answer at
most, and a -1 behind them, are appended to the ring, over the oldest tokens; what would be written over again in the same call
is left out.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.suffix_keep.reference import suffix_keep as _reference

suffix_keep = Op(
    "suffix_keep(Tensor(a!) store, Tensor(b!) cursor, Tensor row_slots, Tensor seq_lens, Tensor scope, Tensor alive, "
    "Tensor history, Tensor prompt_len, Tensor num_tokens) -> ()",
    reference=_reference,
    triton="headway.kernels.suffix_keep.triton:suffix_keep",
    cpu="headway.kernels.cpu.draft_ops:suffix_keep",
)
