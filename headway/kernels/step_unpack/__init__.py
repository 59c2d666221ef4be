"""``step_unpack``: expands the packed step, with the slot tables, into what a forward pass reads.

step_unpack(Tensor packed, Tensor history, Tensor num_computed, Tensor alive, Tensor block_tables, Tensor(a!) input_ids,
            Tensor(b!) positions, Tensor(c!) kv_slots, Tensor(d!) query_start, Tensor(e!) seq_lens,
            Tensor(f!) row_slots, Tensor(g!) logit_indices, int block_size, int max_query_len,
            Tensor? num_tokens=None, Tensor? drafts=None) -> ()

S = slots, L = most tokens of a slot, MB = blocks per sequence, T = padded tokens, R = padded rows, W = outcomes a row can have
(1 without drafts), K = drafts a slot has room for. All int32.

    packed         [P]; packed[2] = rows, packed[3] = tokens, packed[4] = offset of the row records, each (slot,
                   query_len, query_start, outcomes); rows lie one after the other from token 0
    history        [S, L] token ids         num_computed, alive  [S]         block_tables  [S, MB] ([S] when MB = 1)
    input_ids, positions, kv_slots          [T], out       query_start  [R + 1], out
                   With G groups of layers block_tables is [G, S, MB], contiguous, and kv_slots [G, T], rows contiguous
    seq_lens, row_slots    [R], out         logit_indices  [R], with drafts [W R], out
    max_query_len  >= every query_len; sizes the grid
    num_tokens     [S], known tokens of each slot; with ``drafts`` only
    drafts         [S, K], tokens that are guessed to follow the known ones; None: rows hold known tokens alone

Row r continues its slot at start = num_computed[slot]: its token i has position start + i, id history[slot,
position] and KV slot block_tables[slot, position // block_size] * block_size + position % block_size (-1 on the null
block, 0). seq_lens = start + query_len; logit_indices = the row's last token.

With drafts: a token at position p >= num_tokens[slot] is drafts[slot, p - num_tokens[slot]] (0 beyond the K-th), and
logit_indices[w R + r] is the token whose logits give the w-th outcome of row r: its w-th token, at most its last one, in
rows of several outcomes (``outcomes`` > 1); else its last.

Zombie rows (alive[slot] = 0) keep row_slots, query_start and logit_indices; their tokens have id 0, position 0, KV slot
-1, and seq_lens is 0. A row whose slot lies outside the tables, or whose tokens lie outside [0, L), is treated as a
zombie (its row_slots is -1 if the slot is outside). Pad rows have row_slots -1, query_start = tokens, seq_lens 0,
logit_indices 0; tokens after the last have id 0, position 0, KV slot -1. Every output element is written.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.step_unpack.reference import step_unpack as _reference

step_unpack = Op(
    "step_unpack(Tensor packed, Tensor history, Tensor num_computed, Tensor alive, Tensor block_tables, "
    "Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) kv_slots, Tensor(d!) query_start, Tensor(e!) seq_lens, "
    "Tensor(f!) row_slots, Tensor(g!) logit_indices, int block_size, int max_query_len, "
    "Tensor? num_tokens=None, Tensor? drafts=None) -> ()",
    reference=_reference,
    triton="headway.kernels.step_unpack.triton:step_unpack",
    cpu="headway.kernels.cpu.step_ops:step_unpack",
)
