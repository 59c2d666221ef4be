"""``chain_unpack``: the next link of a chain of drafts: keeps the draft just drawn, and lays out the row that draws the next.

chain_unpack(Tensor(a!) drafts, Tensor row_slots, Tensor token_ids, Tensor history, Tensor num_tokens, Tensor num_computed,
             Tensor alive, Tensor block_table, Tensor(b!) input_ids, Tensor(c!) positions, Tensor(d!) kv_slots,
             Tensor(e!) seq_lens, int block_size, int link, int first) -> ()

S = slots, R = rows, K = drafts, L = most tokens of a slot, MB = blocks of a slot. All int32.

    drafts      [S, K]                        token_ids   [R], draft ``link`` - 1 of each row; unused when link is 0
    row_slots   [R]; outside [0, S): padding  history     [S, L]       num_tokens, num_computed, alive  [S]
    block_table [S, MB], 0: no block          input_ids, positions, kv_slots, seq_lens  [R], out
    link        0 <= link <= K                first       of link 0: its position less num_tokens, -1 or less

Where link > 0, drafts[slot, link - 1] becomes the row's token, on every row that is no padding. A row goes on when its request
lives, all its tokens but the last are computed, and its position num_tokens + first + link has a block: its input is the
token, with link 0 the one at that position; kv_slots is block * block_size + position mod block_size and seq_lens position + 1.
Other rows, and all behind the last draft (link = K): input, position and length 0, kv_slots -1.
"""

from __future__ import annotations

from headway.kernels.chain_unpack.reference import chain_unpack as _reference
from headway.kernels.registry import Op

chain_unpack = Op(
    "chain_unpack(Tensor(a!) drafts, Tensor row_slots, Tensor token_ids, Tensor history, Tensor num_tokens, "
    "Tensor num_computed, Tensor alive, Tensor block_table, Tensor(b!) input_ids, Tensor(c!) positions, "
    "Tensor(d!) kv_slots, Tensor(e!) seq_lens, int block_size, int link, int first) -> ()",
    reference=_reference,
    triton="headway.kernels.chain_unpack.triton:chain_unpack",
)
