"""``grammar_advance``: ``slot_advance`` where slots may have grammars: it also moves each grammar by the sampled token.

grammar_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor(a!) history, Tensor(b!) num_tokens,
                Tensor(c!) num_computed, Tensor(d!) alive, Tensor(e!) counts, Tensor count_on, Tensor min_total,
                Tensor max_total, Tensor stop_counts, Tensor stop_ids, Tensor grammar_on, Tensor grammar_info,
                Tensor(f!) grammar_state, Tensor grammar_table, Tensor vocabulary, Tensor(g!) results, Tensor? drafts=None,
                Tensor(h!)? next_slots=None, int offset=0) -> ()

    grammar_*   and vocabulary as in ``grammar_mask``; all others as in ``slot_advance``

First all that ``slot_advance`` does. Then, for every row whose slot has a grammar and that sampled in this step
(results[ring, r, 0] = offset + 1), by its finish code: none or LENGTH: the state becomes the one after the token's bytes.
EOS: the state stays. A token that leads to state 0, or EOS in a state that does not accept, broke the grammar: the finish
code becomes NO_TOKEN and alive 0, and the row does not go on. STOP_TOKEN and NO_TOKEN: nothing happens.
Nothing is written for a ring index or a slot outside its table; a token outside [0, V) leads to state 0.

One operation and not one after the other, for the second launch was most of its time.
"""

from __future__ import annotations

from headway.kernels.grammar_advance.reference import grammar_advance as _reference
from headway.kernels.registry import Op

grammar_advance = Op(
    "grammar_advance(Tensor packed, Tensor row_slots, Tensor token_ids, Tensor(a!) history, Tensor(b!) num_tokens, "
    "Tensor(c!) num_computed, Tensor(d!) alive, Tensor(e!) counts, Tensor count_on, Tensor min_total, "
    "Tensor max_total, Tensor stop_counts, Tensor stop_ids, Tensor grammar_on, Tensor grammar_info, "
    "Tensor(f!) grammar_state, Tensor grammar_table, Tensor vocabulary, Tensor(g!) results, Tensor? drafts=None, "
    "Tensor(h!)? next_slots=None, int offset=0) -> ()",
    reference=_reference,
    triton="headway.kernels.grammar_advance.triton:grammar_advance",
    cpu="headway.kernels.cpu.grammar_ops:grammar_advance",
)
