"""``grammar_mask``: forbids every token that the row's grammar cannot go on with.

grammar_mask(Tensor(a!) logits, Tensor slots, Tensor grammar_on, Tensor grammar_info, Tensor grammar_state,
             Tensor grammar_table, Tensor vocabulary, Tensor stop_counts, Tensor stop_ids, Tensor grammar_serial,
             Tensor(b!) grammar_kept) -> ()

    logits         float [N, V], in place     slots  int32 [N], no slot twice; rows with a slot outside
                   [0, S) stay untouched
    grammar_on     int32 [S], 0 = off
    grammar_info   int32 [S, 3] = (states, classes, first accepting state)
    grammar_state  int32 [S]; 0 is the dead state
    grammar_table  int32 [S, W]: the class of each of the 256 bytes, then two in an int (the lower half first) uint16
                   [states, classes], the next state, and uint16 [states], the state's kind: states of one kind can read the
                   same tokens
    vocabulary     int32 [C + 1, V]: the bytes of each token, four in an int (the lowest first), then its length; tokens of
                   length 0 are never allowed
    stop_counts    int32 [S, 2] = (eos ids, all stop ids)      stop_ids  int32 [S, C'], eos ids first ([S] when C' = 1)
    grammar_serial int32 [S], another number above 0 for each automaton that a slot ever holds
    grammar_kept   int32 [S, kept_ints(V)], zeros at first: what a kernel remembers of a slot, for itself

A token is allowed if its bytes, read from the slot's state, never lead to state 0; an eos id if and only if the state is
an accepting one. The logits of all other tokens become -inf. Whatever would be read outside of a table is dead.

A grammar soon comes back to a kind of state: inside a string at once, in an array with the next item. Which tokens that can
read does not change. So the kernel keeps it of RECORDS kinds for each slot, a bit for each token, and reads the vocabulary only
for others. The reference reads it always, and no kinds.
"""

from __future__ import annotations

from headway.core.ints import cdiv
from headway.kernels.grammar_mask.reference import grammar_mask as _reference
from headway.kernels.registry import Op

BLOCK = 512
"""Tokens of which a slot keeps one record: kind, serial number, a bit for each token."""
RECORD_INTS = 2 + BLOCK // 32
RECORDS = 32
"""Kinds that a slot keeps, each in the place that its number's remainder names. The most common kinds have the lowest numbers,
so they do not share places."""


def kept_ints(vocab: int) -> int:
    """Width of ``grammar_kept``."""
    return RECORDS * cdiv(vocab, BLOCK) * RECORD_INTS


grammar_mask = Op(
    "grammar_mask(Tensor(a!) logits, Tensor slots, Tensor grammar_on, Tensor grammar_info, Tensor grammar_state, "
    "Tensor grammar_table, Tensor vocabulary, Tensor stop_counts, Tensor stop_ids, Tensor grammar_serial, "
    "Tensor(b!) grammar_kept) -> ()",
    reference=_reference,
    triton="headway.kernels.grammar_mask.triton:grammar_mask",
    cpu="headway.kernels.cpu.grammar_ops:grammar_mask",
)
