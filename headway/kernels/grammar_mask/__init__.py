"""``grammar_mask``: forbids every token that the row's grammar cannot go on with.

grammar_mask(Tensor(a!) logits, Tensor slots, Tensor grammar_on, Tensor grammar_info, Tensor grammar_state,
             Tensor grammar_table, Tensor vocabulary, Tensor stop_counts, Tensor stop_ids, Tensor grammar_serial,
             Tensor(b!) grammar_kept) -> ()

    logits         float [N, V], in place     slots  int32 [N], no slot twice; rows with a slot outside
                   [0, S) stay untouched
    grammar_on     int32 [S], 0 = off
    grammar_info   int32 [S, 3] = (states, classes, first accepting state)
    grammar_state  int32 [S]; 0 is the dead state
    grammar_table  int32 [S, W]: the class of each of the 256 bytes, then uint16 [states, classes], the next state, two in an
                   int (the lower half first)
    vocabulary     int32 [C + 1, V]: the bytes of each token, four in an int (the lowest first), then its length; tokens of
                   length 0 are never allowed
    stop_counts    int32 [S, 2] = (eos ids, all stop ids)      stop_ids  int32 [S, C'], eos ids first ([S] when C' = 1)
    grammar_serial int32 [S], another number above 0 for each automaton that a slot ever holds
    grammar_kept   int32 [S, kept_ints(V)], zeros at first: what a kernel remembers of a slot, for itself

A token is allowed if its bytes, read from the slot's state, never lead to state 0; an eos id if and only if the state is
an accepting one. The logits of all other tokens become -inf. Whatever would be read outside of a table is dead.

A grammar soon comes back to a state: inside a string at once, in an array with the next item. Which tokens a state can read
does not change. So the kernel keeps that of RECORDS states of each slot, a bit for each token, and reads the vocabulary only
for others.
"""

from __future__ import annotations

from headway.core.ints import cdiv
from headway.kernels.grammar_mask.reference import grammar_mask as _reference
from headway.kernels.registry import Op

BLOCK = 512
"""Tokens of which a slot keeps one record: state, serial number, a bit for each token."""
RECORD_INTS = 2 + BLOCK // 32
RECORDS = 16
"""States that a slot keeps, each in the place that its number's remainder names: an automaton numbers its states in the order
in which it comes by them, so the states of one loop seldom share a place."""


def kept_ints(vocab: int) -> int:
    """Width of ``grammar_kept``."""
    return RECORDS * cdiv(vocab, BLOCK) * RECORD_INTS


grammar_mask = Op(
    "grammar_mask(Tensor(a!) logits, Tensor slots, Tensor grammar_on, Tensor grammar_info, Tensor grammar_state, "
    "Tensor grammar_table, Tensor vocabulary, Tensor stop_counts, Tensor stop_ids, Tensor grammar_serial, "
    "Tensor(b!) grammar_kept) -> ()",
    reference=_reference,
    meta=lambda *args: None,
    triton="headway.kernels.grammar_mask.triton:grammar_mask",
    cpu="headway.kernels.cpu.grammar_ops:grammar_mask",
)
