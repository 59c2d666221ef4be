"""``grammar_mask`` in Triton: programs (part of the vocabulary, share of the constrained rows).

A part whose record is of the kind of the row's state is done by its bits. Else each lane reads one token's bytes through the
automaton, until all lanes are dead or done, and the record is written anew. A (row, part) is one program's, so nobody reads a
record that another program writes.

Every program finds out for itself which rows have a grammar: one such row among 256 takes as few programs as among eight.
Loads that wait for no other are issued together: the weights have passed through the cache since the last mask, so each one
in a chain is a trip to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS
from headway.kernels.grammar_mask import BLOCK, RECORD_INTS, RECORDS, kept_ints
from headway.kernels.triton_automaton import following_state
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

WARPS, REGISTERS = 4, 64
"""Eight warps of 40 registers, two tokens a lane, read no faster, and take half as long again where a record does."""
PROGRAMS = 1056
"""As many as run at once on a large device (eight on each of 132 processors). Twice as many read a tenth faster, and cost more
where records do."""


@triton.jit
def read_tokens(
    column, first, length, start, table, num_states, num_classes, table_ints, vocab, CLASS_INTS: tl.constexpr
):
    """int32, like ``length``: the state after each token's bytes; 0 where there are none."""
    four = first
    state = tl.where(length > 0, start, 0)
    done = 0
    longest = tl.max(tl.where(state != 0, length, 0), 0)
    while done < longest:
        groups = ()
        for i in tl.static_range(4):
            group = tl.load(table + ((four >> (8 * i)) & 255))
            groups = groups + (group,)  # type: ignore[assignment]  # noqa: RUF005  Triton knows no unpacking
        for i in tl.static_range(4):
            walks = (state != 0) & (done + i < length)
            state = following_state(table, state, groups[i], walks, num_states, num_classes, table_ints, CLASS_INTS)
        done += 4
        longest = tl.max(tl.where(state != 0, length, 0), 0)
        four = tl.load(column + (done // 4) * vocab, mask=(state != 0) & (done < length), other=0)
    return state


@triton.jit(do_not_specialize=["num_rows"])
def grammar_mask_kernel(
    logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
    grammar_serial, grammar_kept, num_rows, row_stride, vocab, num_slots, table_ints, num_words, stop_width, kept_width,
    CLASS_INTS: tl.constexpr, BLOCK: tl.constexpr, RECORD_INTS: tl.constexpr, RECORDS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    lane = tl.arange(0, BLOCK)
    token = tl.program_id(0) * BLOCK + lane
    real = token < vocab
    column = vocabulary + token
    length = tl.load(column + num_words.to(tl.int64) * vocab, mask=real, other=0)
    length = tl.minimum(length, 4 * num_words)
    first = tl.load(column, mask=real, other=0)
    index = tl.arange(0, ROWS)
    slot_of = tl.load(slots + index, mask=index < num_rows, other=-1)
    on = (slot_of >= 0) & (slot_of < num_slots)
    on = on & (tl.load(grammar_on + slot_of, mask=on, other=0) != 0)
    number = tl.cumsum(on.to(tl.int32), 0)  # of each constrained row, from 1
    for nth in range(tl.program_id(1), tl.max(number, 0), tl.num_programs(1)):
        mine = on & (number == nth + 1)
        row = tl.max(tl.where(mine, index, 0), 0).to(tl.int64)
        # Not loaded again: that would be one more wait in the chain.
        slot = tl.max(tl.where(mine, slot_of, 0), 0).to(tl.int64)
        num_states = tl.load(grammar_info + 3 * slot)
        num_classes = tl.load(grammar_info + 3 * slot + 1)
        accepting = tl.load(grammar_info + 3 * slot + 2)
        start = tl.load(grammar_state + slot)
        serial = tl.load(grammar_serial + slot)
        num_eos = tl.minimum(tl.load(stop_counts + 2 * slot), stop_width)
        start = tl.where((start > 0) & (start < num_states) & (num_classes > 0), start, 0)
        table = grammar_table + slot * table_ints
        kinds = 2 * CLASS_INTS + num_states * num_classes + start
        kind_at = table.to(tl.pointer_type(tl.uint16), bitcast=True) + kinds
        known = (start > 0) & (kinds > 0) & (kinds < 2 * table_ints)
        kind = tl.where(known, tl.load(kind_at, mask=known, other=0).to(tl.int32), 65536 + start)
        place = (kind % RECORDS) * tl.num_programs(0) + tl.program_id(0)
        record = grammar_kept + slot * kept_width + place * RECORD_INTS
        kept_kind = tl.load(record)
        kept_serial = tl.load(record + 1)
        bits = tl.load(record + 2 + lane // 32)
        alive = (bits >> (lane % 32)) & 1
        if (kept_kind != kind) | (kept_serial != serial):
            state = read_tokens(
                column, first, length, start, table, num_states, num_classes, table_ints, vocab, CLASS_INTS
            )
            alive = (state != 0).to(tl.int32)
            words = tl.sum(tl.reshape(alive << (lane % 32), [BLOCK // 32, 32]), 1)
            wait_for_inputs(EARLY)
            tl.store(record + 2 + tl.arange(0, BLOCK // 32), words)
            tl.store(record, kind)
            tl.store(record + 1, serial)
        ends = (start > 0) & (start >= accepting)
        allowed = alive != 0
        for stop in range(num_eos):
            allowed = tl.where(token == tl.load(stop_ids + slot * stop_width + stop), ends, allowed)
        wait_for_inputs(EARLY)  # only the logits come from the kernel before
        tl.store(logits + row * row_stride + token, float("-inf"), mask=real & ~allowed)
    wait_for_inputs(EARLY)


def grammar_mask(
    logits: torch.Tensor,
    slots: torch.Tensor,
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    grammar_serial: torch.Tensor,
    grammar_kept: torch.Tensor,
) -> None:
    num_rows, vocab = logits.shape
    num_slots = grammar_on.numel()
    assert vocabulary.shape[1] == vocab, "the vocabulary is not the logits'"
    assert grammar_kept.numel() == num_slots * kept_ints(vocab), "the records are not the vocabulary's"
    if num_rows == 0:
        return
    parts = triton.cdiv(vocab, BLOCK)
    # As wide as the engine has slots, not as the step has rows: one compilation serves all sizes.
    widest = triton.next_power_of_2(max(num_rows, num_slots))
    grammar_mask_kernel[(parts, max(1, min(num_rows, PROGRAMS // parts)))](
        logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
        grammar_serial, grammar_kept, num_rows, logits.stride(0), vocab, num_slots, grammar_table.shape[1],
        vocabulary.shape[0] - 1, stop_ids.numel() // num_slots, kept_ints(vocab), CLASS_INTS=CLASS_INTS, BLOCK=BLOCK,
        RECORD_INTS=RECORD_INTS, RECORDS=RECORDS, ROWS=widest, num_warps=WARPS, maxnreg=REGISTERS,
        **launch_early(logits.device),
    )  # fmt: skip
