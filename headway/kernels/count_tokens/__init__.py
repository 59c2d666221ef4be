"""``count_tokens``: rebuilds the token counts of slots from their history.

count_tokens(Tensor(a!) counts, Tensor slots, Tensor history, Tensor prompt_len, Tensor num_tokens,
             int max_tokens_bound) -> ()

    counts      int16 [S, V]: bit 15 = the token occurs in the prompt, low 15 bits = times generated (at most 32767)
    slots       int32 [n]: rows to rebuild; -1 (or anything outside [0, S)) is skipped
    history     int32 [S, L] token ids; ids outside [0, V) are not counted
    prompt_len, num_tokens   int32 [S]
    max_tokens_bound  >= num_tokens of every listed slot
"""

from __future__ import annotations

from headway.kernels.count_tokens.reference import count_tokens as _reference
from headway.kernels.registry import Op

count_tokens = Op(
    "count_tokens(Tensor(a!) counts, Tensor slots, Tensor history, Tensor prompt_len, Tensor num_tokens, "
    "int max_tokens_bound) -> ()",
    reference=_reference,
    triton="headway.kernels.count_tokens.triton:count_tokens",
    cpu="headway.kernels.cpu.step_ops:count_tokens",
)
