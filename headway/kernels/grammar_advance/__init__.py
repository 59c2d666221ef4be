"""``grammar_advance``: moves each slot's grammar by the token that its row sampled. Runs after ``slot_advance``.

grammar_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor grammar_on, Tensor grammar_info,
                Tensor(a!) grammar_state, Tensor grammar_table, Tensor vocabulary, Tensor(b!) alive,
                Tensor(c!) results) -> ()

    packed      int32 [P]; packed[5] = index in the result ring
    row_slots   int32 [R], -1 on padding             token_ids  int32 [R], the sampled tokens
    alive       int32 [S]                            results  int32 [K, R', 4], R' >= R, as ``slot_advance`` left it
    grammar_*   and vocabulary as in ``grammar_mask``

For every row whose slot has a grammar and that sampled in this step (results[ring, r, 0] != 0), by its finish code: none or
LENGTH: the state becomes the one after the token's bytes. EOS: the state stays. A token that leads to state 0, or EOS in a
state that does not accept, broke the grammar: the finish code becomes NO_TOKEN and alive 0. STOP_TOKEN and NO_TOKEN: nothing
happens.
Nothing is written for a ring index or a slot outside its table; a token outside [0, V) leads to state 0.
"""

from __future__ import annotations

from headway.kernels.grammar_advance.reference import grammar_advance as _reference
from headway.kernels.registry import Op

grammar_advance = Op(
    "grammar_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor grammar_on, Tensor grammar_info, "
    "Tensor(a!) grammar_state, Tensor grammar_table, Tensor vocabulary, Tensor(b!) alive, Tensor(c!) results) -> ()",
    reference=_reference,
    meta=lambda *args: None,
    triton="headway.kernels.grammar_advance.triton:grammar_advance",
    cpu="headway.kernels.cpu.grammar_ops:grammar_advance",
)
