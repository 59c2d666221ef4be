"""``cross_attention``: each token of a step sees all encoder outputs of its request, in the paged cache.

cross_attention(q, k_cache, v_cache, block_tables, slots, starts, lens, arrivals, scale, max_len_bound) -> out
    q             [T, H, D] (bf16, f16, f32), last two dimensions contiguous; H a multiple of KH
    k_cache, v_cache  [NB, bs, KH, D] in q's dtype or float8_e4m3fn, equal strides; bs a power of two from 8 to 256
    block_tables  int32 [S, MB]; an id outside [0, NB) reads block 0
    slots         int32 [T], token -> row of block_tables; outside [0, S): its output is zeros
    starts        int32 [T + 1], 0, 1, ..., T: each token is a row
    lens          int32 [T], encoder outputs that it sees, at most MB * bs; 0: its output is zeros
    arrivals      int32 [>= T, KH] scratch, zero before and after
    max_len_bound >= every length; sizes grids only
    out           [T, H, D] in q's dtype

The keys and values were written by an encoder job of an earlier step, or of this one by a kernel that has surely ended
(``triton_early``, 2): a job runs ahead of the kernel that applies the step's edits. A token that sees all keys is what
``paged_attention`` calls a decode row, whatever row of the step it belongs to, so its decode kernel serves.
"""

from __future__ import annotations

from headway.kernels.cross_attention import reference
from headway.kernels.registry import Op, like_first

cross_attention = Op(
    "cross_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor slots, Tensor starts, Tensor lens, "
    "Tensor(a!) arrivals, float scale, int max_len_bound) -> Tensor",
    reference=reference.cross_attention,
    meta=like_first,
    triton="headway.kernels.cross_attention.triton:cross_attention",
    cpu="headway.kernels.cross_attention.host:cross_attention",
)
