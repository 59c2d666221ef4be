"""``gather_logprobs`` in Triton: two launches.

1. (row, chunk): sum of exponentials, how many logits reach the chosen token's, and the maximum of each part.
2. (row): the sums' total; the most likely tokens, found among the candidates that the parts' maxima point at
   (``triton_candidates``): a candidate's place in the list is the number of candidates before it.

A row with too many candidates (ties without end) takes its entries one by one off the whole row. Above MAX_SELECT entries
a stable descending ``torch.sort`` of the rows (also lower id first; allocates but does not wait, so it can be captured)
gives the order instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_candidates import collect, count_floor
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_math import load_logits, order_key, weight_below

MAX_SELECT = 128
CHUNK = 4096
PART = 128
FEW = 64
"""Up to so many entries, and from there to MAX_SELECT, all numbers share a kernel: no request waits for its own to compile."""
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _wanted(slots, row, num_slots, num_logprobs, id_counts):
    """(slot, asked, entries of the top list, listed ids) of a row."""
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    wanted = tl.load(num_logprobs + slot, mask=on, other=-1)
    listed = tl.load(id_counts + slot, mask=on, other=0)
    return slot, on & ((wanted >= 0) | (listed > 0)), tl.where(listed > 0, 0, tl.maximum(wanted, 0)), listed


@triton.jit
def _value(logits, row, row_stride, vocab, token):
    """Logit of one or many tokens; -inf outside the vocabulary."""
    return load_logits(logits + row * row_stride + token, (token >= 0) & (token < vocab))


@triton.jit(do_not_specialize_on_alignment=["token_ids", "slots"])  # may be lists inside a packed step
def chunk_kernel(
    logits, token_ids, slots, num_logprobs, id_counts, part_top, chunk_sum, chunk_rank, row_stride, vocab, num_slots,
    BLOCK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    _, asked, _, _ = _wanted(slots, row, num_slots, num_logprobs, id_counts)
    wait_for_inputs(EARLY)
    if asked:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = token < vocab
        x = load_logits(logits + row * row_stride + token, mask)
        chosen = _value(logits, row, row_stride, vocab, tl.load(token_ids + row))
        tops = tl.max(tl.reshape(x, [BLOCK // PART, PART]), 1)
        place = row * tl.num_programs(1) + chunk
        tl.store(part_top + place * (BLOCK // PART) + tl.arange(0, BLOCK // PART), tops)
        tl.store(chunk_sum + place, tl.sum(tl.where(mask, weight_below(x, tl.max(tops, 0)), 0.0), 0))
        tl.store(chunk_rank + place, tl.sum((mask & (x >= chosen)).to(tl.int32), 0))


@triton.jit
def _before(key, values, size, CANDIDATES: tl.constexpr, STEP: tl.constexpr):
    """How many candidates come before each: larger ones, and equal ones with a lower token (they are sorted by token)."""
    index = tl.arange(0, CANDIDATES)
    before = tl.zeros([CANDIDATES], tl.int32)
    for begin in range(0, size, STEP):
        other = begin + tl.arange(0, STEP)
        rival = order_key(tl.load(values + other, mask=other < size, other=float("-inf")))
        wins = (rival[None, :] > key[:, None]) | ((rival[None, :] == key[:, None]) & (other[None, :] < index[:, None]))
        before += tl.sum((wins & (other < size)[None, :]).to(tl.int32), 1)
    return before


@triton.jit
def _next_best(line, vocab, value, token, BLOCK: tl.constexpr):
    """(value, token) that follows ``value``, ``token`` in the order of a row's tokens."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for begin in range(0, vocab, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        mask = place < vocab
        x = load_logits(line + place, mask)
        later = mask & ((x < value) | ((x == value) & (place > token)))
        better = later & ((x > best) | ((x == best) & (place < winner)))
        best = tl.where(better, x, best)
        winner = tl.where(better, place, winner)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, winner, NO_TOKEN), 0)


@triton.jit
def _logprob(value, top, log_mass):
    logprob = tl.where(value == top, 0.0, value - top) - log_mass
    return tl.where(value == float("-inf"), float("-inf"), logprob)


@triton.jit
def _most_likely(
    line, vocab, number, top, log_mass, tops, parts, hot, values, tokens, ids, logprobs,
    PARTS: tl.constexpr, PART: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the ``number`` most likely tokens and their log-probabilities."""
    floor = count_floor(tops, top, number)
    size = collect((line,), tops, floor, 1.0, vocab, parts, hot, values, tokens, PARTS, PART, 2048, CANDIDATES)
    if size <= CANDIDATES:
        index = tl.arange(0, CANDIDATES)
        value = tl.load(values + index, mask=index < size, other=float("-inf"))
        token = tl.load(tokens + index, mask=index < size, other=0)
        place = _before(order_key(value), values, size, CANDIDATES, 16)
        listed = (index < size) & (place < number)
        tl.store(ids + place, token, mask=listed)
        tl.store(logprobs + place, _logprob(value, top, log_mass), mask=listed)
    else:
        last_value = top
        last_token = -1
        for i in range(0, number):
            last_value, last_token = _next_best(line, vocab, last_value, last_token, 4096)
            tl.store(ids + i, last_token)
            tl.store(logprobs + i, _logprob(last_value, top, log_mass))


@triton.jit(do_not_specialize=["max_entries"], do_not_specialize_on_alignment=["token_ids", "slots"])
def merge_kernel(
    logits, token_ids, slots, num_logprobs, id_counts, id_table, part_top, chunk_sum, chunk_rank, hot, values, tokens,
    sorted_ids, ids, logprobs, ranks, counts, row_stride, vocab, num_slots, table_width, max_entries, chunks, parts,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, ENTRIES: tl.constexpr, CANDIDATES: tl.constexpr,
    SORTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot, asked, wanted, listed = _wanted(slots, row, num_slots, num_logprobs, id_counts)
    wait_for_inputs(EARLY)
    out = row * (max_entries + 1)
    entry = tl.arange(0, ENTRIES)
    token = tl.zeros([ENTRIES], tl.int32)
    logprob = tl.zeros([ENTRIES], tl.float32)
    written = tl.full([ENTRIES], 1, tl.int1)
    rank = 0
    count = 0
    if asked:
        part = tl.arange(0, PARTS)
        tops = tl.load(part_top + row * parts + part, mask=part < parts, other=float("-inf"))
        top = tl.max(tops, 0)
        chunk = tl.arange(0, CHUNKS)
        mask = chunk < chunks
        in_chunk = chunk[:, None] * (PARTS // CHUNKS) + tl.arange(0, PARTS // CHUNKS)[None, :]
        chunk_tops = tl.load(part_top + row * parts + in_chunk, mask=in_chunk < parts, other=float("-inf"))
        sums = tl.load(chunk_sum + row * chunks + chunk, mask=mask, other=0.0)
        log_mass = tl.log(tl.sum(sums * weight_below(tl.max(chunk_tops, 1), top), 0))
        rank = tl.sum(tl.load(chunk_rank + row * chunks + chunk, mask=mask, other=0), 0)
        number = tl.where(listed > 0, tl.minimum(listed, table_width), tl.minimum(wanted, vocab))
        number = tl.minimum(number, max_entries)
        given = (entry > 0) & (entry <= number)
        if listed > 0:
            token = tl.load(id_table + slot * table_width + entry - 1, mask=given, other=0)
        elif SORTED:
            token = tl.load(sorted_ids + row * vocab + entry - 1, mask=given, other=0).to(tl.int32)
        elif number > 0:
            _most_likely(
                logits + row * row_stride, vocab, number, top, log_mass, tops, parts, hot + row * parts,
                values + row * CANDIDATES, tokens + row * CANDIDATES, ids + out + 1, logprobs + out + 1,
                PARTS, PART, CANDIDATES,
            )  # fmt: skip
            written = (entry == 0) | (entry > number)
        token = tl.where(entry == 0, tl.load(token_ids + row), token)
        logprob = _logprob(_value(logits, row, row_stride, vocab, token), top, log_mass)
        count = number + 1
    known = (token >= 0) & (token < vocab)
    valid = entry < count
    mask = written & (entry <= max_entries)
    tl.store(ids + out + entry, tl.where(valid & known, token, 0), mask=mask)
    tl.store(logprobs + out + entry, tl.where(valid, logprob, 0.0), mask=mask)
    tl.store(ranks + row, rank)
    tl.store(counts + row, count)


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_logprobs: torch.Tensor,
    id_counts: torch.Tensor,
    id_table: torch.Tensor,
    max_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (rows, vocab), device, num_slots = logits.shape, logits.device, num_logprobs.numel()
    ids = torch.empty(rows, 1 + max_entries, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, 1 + max_entries, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids, logprobs, ranks, counts
    chunks = triton.cdiv(vocab, CHUNK)
    parts = chunks * (CHUNK // PART)
    entries, candidates = (FEW, 256) if max_entries <= FEW else (max(max_entries, MAX_SELECT), 1024)
    part_top = torch.empty(rows, parts, dtype=torch.float32, device=device)
    chunk_sum = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    chunk_rank = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    hot = torch.empty(rows, parts, dtype=torch.int32, device=device)
    values = torch.empty(rows, candidates, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, candidates, dtype=torch.int32, device=device)
    sorted_ids = ids
    if max_entries > MAX_SELECT:
        clean = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        sorted_ids = clean.sort(dim=1, descending=True, stable=True).indices
    chunk_kernel[(rows, chunks)](
        logits, token_ids, slots, num_logprobs, id_counts, part_top, chunk_sum, chunk_rank, logits.stride(0), vocab,
        num_slots, BLOCK=CHUNK, PART=PART, num_warps=8, **launch_early(device),
    )  # fmt: skip
    merge_kernel[(rows,)](
        logits, token_ids, slots, num_logprobs, id_counts, id_table, part_top, chunk_sum, chunk_rank, hot, values,
        tokens, sorted_ids, ids, logprobs, ranks, counts, logits.stride(0), vocab, num_slots,
        id_table.numel() // num_slots, max_entries, chunks, parts, CHUNKS=triton.next_power_of_2(chunks),
        PARTS=triton.next_power_of_2(parts), PART=PART,
        ENTRIES=triton.next_power_of_2(1 + entries), CANDIDATES=candidates, SORTED=max_entries > MAX_SELECT,
        num_warps=8, **launch_early(device),
    )  # fmt: skip
    return ids, logprobs, ranks, counts
