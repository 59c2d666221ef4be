"""``slot_advance`` in Triton: one program (one warp) per row. All but the token is loaded while that is still being drawn.

With GRAMMAR it is ``grammar_advance``: of the two in a row each loaded on its own what it needs of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS
from headway.core.plan import Finish
from headway.kernels.triton_automaton import ready_to_walk, walk
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

NONE, EOS = tl.constexpr(int(Finish.NONE)), tl.constexpr(int(Finish.EOS))
STOP_TOKEN, LENGTH = tl.constexpr(int(Finish.STOP_TOKEN)), tl.constexpr(int(Finish.LENGTH))
NO_TOKEN = tl.constexpr(int(Finish.NO_TOKEN))


@triton.jit
def slot_advance_kernel(
    packed, row_slots, token_ids, history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total,
    stop_counts, stop_ids, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, results, packed_size,
    num_slots, length, vocab, width, ring_size, ring_stride, table_ints, num_words, drafts, next_slots, offset,
    STOPS: tl.constexpr, GRAMMAR: tl.constexpr, CLASS_INTS: tl.constexpr, OUTCOMES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if drafts is None:
        start_next(EARLY)
    # With drafts the next outcome's kernels, this one among them, read before they wait what is written here: none may start
    # before this one has ended.
    row = tl.program_id(0)
    ring = tl.load(packed + 5)
    at = tl.load(packed + 4).to(tl.int64) + 4 * row
    slot = tl.load(row_slots + row).to(tl.int64)
    live = (row < tl.load(packed + 2)) & (at >= 0) & (at + 3 < packed_size) & (slot >= 0) & (slot < num_slots)
    query_len = tl.load(packed + at + 1, mask=live, other=0)
    samples = tl.load(packed + at + 3, mask=live, other=0)
    computed = tl.load(num_computed + slot, mask=live, other=0)
    before = tl.load(num_tokens + slot, mask=live, other=0)
    least = tl.load(min_total + slot, mask=live, other=0)
    most = tl.minimum(tl.load(max_total + slot, mask=live, other=0), length)
    num_eos = tl.load(stop_counts + 2 * slot, mask=live, other=0)
    num_stops = tl.minimum(tl.load(stop_counts + 2 * slot + 1, mask=live, other=0), width)
    column = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids + slot * width + column, mask=live & (column < width), other=-1)
    counts_on = tl.load(count_on + slot, mask=live, other=0)
    inside = (ring >= 0) & (ring < ring_size)
    if GRAMMAR:
        follows = live & inside & (tl.load(grammar_on + slot, mask=live, other=0) != 0)
        num_states = tl.load(grammar_info + 3 * slot, mask=follows, other=0)
        num_classes = tl.load(grammar_info + 3 * slot + 1, mask=follows, other=0)
        accepting = tl.load(grammar_info + 3 * slot + 2, mask=follows, other=0)
        state = tl.load(grammar_state + slot, mask=follows, other=0)
        table = grammar_table + slot * table_ints
        ready = ready_to_walk(table, state, num_states, num_classes, table_ints, CLASS_INTS)
    live = live & (tl.load(alive + slot, mask=live, other=0) != 0)
    draft = -1
    if drafts is not None:
        query_len = tl.where(samples > 1, 1, query_len)
        more = live & (samples > offset + 1) & (offset + 1 < OUTCOMES)
        draft = tl.load(drafts + slot * (OUTCOMES - 1) + offset, mask=more, other=-1)
    wait_for_inputs(EARLY)  # only the tokens come from kernels just before
    sampled = 0
    token = 0
    finish = 0
    total = 0
    if live:
        tl.store(num_computed + slot, computed + query_len)
        total = before
        if samples != 0:
            sampled = 1
            token = tl.load(token_ids + row)
            after = 0
            if GRAMMAR:
                if follows:
                    after = walk(
                        table, ready, vocabulary, token, num_states, num_classes, table_ints, vocab, num_words, CLASS_INTS
                    )  # fmt: skip
            index = tl.min(tl.where((column < num_stops) & (stop_id == token), column, STOPS), 0)
            stops = (index < STOPS) & (total >= least)
            finish = tl.where(
                stops, tl.where(index < num_eos, EOS, STOP_TOKEN), tl.where(total + 1 >= most, LENGTH, NONE)
            )
            finish = tl.where(token < 0, NO_TOKEN, finish)
            if GRAMMAR:
                if follows:
                    goes_on = (finish == NONE) | (finish == LENGTH)
                    accepts = (state >= accepting) & (state > 0) & (state < num_states)
                    tl.store(grammar_state + slot, after, mask=goes_on)
                    broken = (goes_on & (after == 0)) | ((finish == EOS) & ~accepts)
                    finish = tl.where(broken, NO_TOKEN, finish)
            written = tl.maximum(token, 0)
            tl.store(history + slot * length + total, written, mask=(total >= 0) & (total < length))
            counted = (counts_on != 0) & (token >= 0) & (token < vocab)
            count = tl.load(counts + slot * vocab + token, mask=counted, other=0).to(tl.int32)
            counted = counted & ((count & 32767) != 32767)
            tl.store(counts + slot * vocab + token, (count + 1).to(tl.int16), mask=counted)
            total += 1
            tl.store(num_tokens + slot, total)
            tl.store(alive + slot, 0, mask=finish != NONE)
            token = written
    place = results + ring.to(tl.int64) * ring_stride + (3 + OUTCOMES) * row
    token_at = 1
    if drafts is not None:
        goes_on = (sampled != 0) & (finish == NONE) & (draft >= 0) & (draft == token)
        tl.store(next_slots + row, tl.where(goes_on, slot, -1).to(tl.int32))
        inside = inside & (live | (offset == 0))
        sampled = sampled * (offset + 1)
        token_at = tl.where(offset == 0, 1, 3 + offset)
    tl.store(place, sampled, mask=inside)
    tl.store(place + token_at, token, mask=inside)
    tl.store(place + 2, finish, mask=inside)
    tl.store(place + 3, total, mask=inside)


def slot_advance(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    min_total: torch.Tensor,
    max_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    results: torch.Tensor,
    drafts: torch.Tensor | None = None,
    next_slots: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    tables = (history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total, stop_counts, stop_ids)
    launch(packed, row_slots, token_ids, tables, (None,) * 5, results, (drafts, next_slots, offset))


def launch(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    tables: Sequence[torch.Tensor],
    grammars: Sequence[torch.Tensor | None],
    results: torch.Tensor,
    run: tuple[torch.Tensor | None, torch.Tensor | None, int],
) -> None:
    """``tables``: the ten that ``slot_advance`` is given; ``grammars``: the five that ``grammar_advance`` is, too, or None;
    ``run``: drafts, next_slots, offset."""
    history, counts, stop_ids, table, vocabulary = tables[0], tables[4], tables[9], grammars[3], grammars[4]
    num_slots, length = history.shape
    width, vocab = stop_ids.numel() // num_slots, counts.shape[1]
    table_ints = num_words = 0
    outcomes = results.shape[2] - 3
    if table is not None and vocabulary is not None:
        table_ints, num_words = table.shape[1], vocabulary.shape[0] - 1
        assert vocabulary.shape[1] == vocab, "the vocabulary is not the counts'"
    assert results.shape[1] >= row_slots.numel(), "the result ring is narrower than the step"
    slot_advance_kernel[(row_slots.numel(),)](
        packed, row_slots, token_ids, *tables, *grammars, results, packed.numel(), num_slots, length, vocab, width,
        results.shape[0], results.shape[1] * results.shape[2], table_ints, num_words,
        *(run if run[0] is not None else (None,) * 3), STOPS=triton.next_power_of_2(width), GRAMMAR=table is not None,
        CLASS_INTS=CLASS_INTS, OUTCOMES=outcomes, num_warps=1, **launch_early(packed.device),
    )  # fmt: skip
