"""``slot_advance``: the end of a step: appends the sampled tokens, evaluates stop conditions, packs the result.

slot_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor(a!) history, Tensor(b!) num_tokens,
             Tensor(c!) num_computed, Tensor(d!) alive, Tensor(e!) counts, Tensor count_on, Tensor min_total,
             Tensor max_total, Tensor stop_counts, Tensor stop_ids, Tensor(f!) results, Tensor? drafts=None,
             Tensor(g!)? next_slots=None, int offset=0) -> ()

S = slots, R = rows, L = most tokens of a slot, V = vocabulary, C = most stop ids, K = results in the ring, W = outcomes a
row can have. int32 unless said.

    packed       [P]; packed[2] = rows, packed[4] = offset of the row records (slot, query_len, query_start, outcomes),
                 packed[5] = index in the result ring
    row_slots    [R] from step_unpack: -1 on padding        token_ids  [R], the sampled tokens
    history      [S, L]      num_tokens, num_computed, alive, count_on, min_total, max_total  [S]
    counts       int16 [S, V], see count_tokens             stop_counts  [S, 2] = (eos ids, all stop ids)
    stop_ids     [S, C], eos ids first ([S] when C = 1)
    results      [K, R', 3 + W], R' >= R
    drafts       [S, W - 1], the tokens that rows of W outcomes held behind their first; None where W = 1
    next_slots   [R], with drafts only        offset  which of a row's outcomes ``token_ids`` are, 0 <= offset < W

For every live row: num_computed += query_len. If it samples: the token is appended to history at num_tokens,
num_tokens += 1, its count goes up (saturating) where count_on, and the row's finish code (core.plan.Finish) is, in this
order, EOS or STOP_TOKEN if num_tokens before >= min_total and the token is among the stop ids; LENGTH if num_tokens
after >= min(max_total, L). A negative token (``sample`` had nothing to draw) stands for 0 and its code is NO_TOKEN. A
finished row's alive becomes 0.
results[ring, r] = (outcomes so far, first token or 0, finish, num_tokens after, other tokens); zeros on padding and on zombie
rows.

With drafts the operation is called once for each outcome, in order, and ``row_slots`` of a later call are ``next_slots`` of
the one before: the rows that go on, which are those of more outcomes whose request lives and whose next draft is the token
just sampled; -1 for the others, whose records then stay as they are. So a run is cut at the first stop condition, and nothing
behind it is ever written. Of a row of several outcomes each call adds one to num_computed: a draft's KV counts when the draft
is accepted.
Nothing is written for a ring index or a slot outside its table; a token outside [0, V) is not counted.
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.slot_advance.reference import slot_advance as _reference

slot_advance = Op(
    "slot_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor(a!) history, Tensor(b!) num_tokens, "
    "Tensor(c!) num_computed, Tensor(d!) alive, Tensor(e!) counts, Tensor count_on, Tensor min_total, "
    "Tensor max_total, Tensor stop_counts, Tensor stop_ids, Tensor(f!) results, Tensor? drafts=None, "
    "Tensor(g!)? next_slots=None, int offset=0) -> ()",
    reference=_reference,
    triton="headway.kernels.slot_advance.triton:slot_advance",
    cpu="headway.kernels.cpu.step_ops:slot_advance",
)
