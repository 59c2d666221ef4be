"""``synthetic_accept``: pretends that drafts are right, or wrong, so often as one likes. For benchmarks.

synthetic_accept(Tensor(a!) token_ids, Tensor row_slots, Tensor drafts, Tensor num_tokens, Tensor seeds, int offset,
                 int always, int part, int vocab) -> ()

    token_ids   int32 [R], drawn tokens of outcome ``offset``        row_slots  int32 [R]; rows outside [0, S) stay
    drafts      int32 [S, K]   num_tokens  int32 [S]   seeds  int32 [S, 2]
    always      drafts that are right for sure; the one behind them is in ``part`` of 2^24 cases, later ones never are

Where the outcome's draft shall be right the token becomes the draft; where it shall be wrong and is the draft by chance the
token becomes the next one, (token + 1) mod vocab. Behind the last draft (offset = K) tokens stay. Chance is a hash of the
slot's first seed and its number of tokens: of x = seed * 0x9E3779B1 + num_tokens (mod 2^32), mixed twice by
x ^= x >> 16, x *= 0x7FEB352D (mod 2^32), the upper 24 bits are less than ``part``.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.synthetic_accept.reference import synthetic_accept as _reference

synthetic_accept = Op(
    "synthetic_accept(Tensor(a!) token_ids, Tensor row_slots, Tensor drafts, Tensor num_tokens, Tensor seeds, int offset, "
    "int always, int part, int vocab) -> ()",
    reference=_reference,
    triton="headway.kernels.synthetic_accept.triton:synthetic_accept",
)
