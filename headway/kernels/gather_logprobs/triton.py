"""``gather_logprobs`` in Triton: two launches.

1. (row, chunk): maximum, sum of exponentials, how many logits reach the chosen token's, and the chunk's best
   entries, taken one by one off integer keys (value, then lower id), so that ties need no care.
2. (row): merges the chunks the same way and writes the outputs.

Above MAX_SELECT entries, taking them one by one is too slow; a stable descending ``torch.sort`` of the rows (also
lower id first, allocates but does not wait, so it can be captured) gives the order instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_math import load_logits, order_key, weight_below

MAX_SELECT = 32
CHUNK = 4096


@triton.jit
def _next_best(keys, below):
    """Largest of the int64 keys under ``below``."""
    return tl.max(tl.where(keys < below, keys, -0x7FFFFFFFFFFFFFFF), 0)


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


@triton.jit(do_not_specialize=["select"])
def chunk_kernel(
    logits, token_ids, slots, num_logprobs, id_counts, chunk_max, chunk_sum, chunk_rank, chunk_best, row_stride, vocab,
    num_slots, select, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    _, asked, wanted, _ = _wanted(slots, row, num_slots, num_logprobs, id_counts)
    if asked:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = token < vocab
        x = load_logits(logits + row * row_stride + token, mask)
        chosen = _value(logits, row, row_stride, vocab, tl.load(token_ids + row))
        top = tl.max(x, 0)
        place = row * tl.num_programs(1) + chunk
        tl.store(chunk_max + place, top)
        tl.store(chunk_sum + place, tl.sum(tl.where(mask, weight_below(x, top), 0.0), 0))
        tl.store(chunk_rank + place, tl.sum((mask & (x >= chosen)).to(tl.int32), 0))
        keys = order_key(x).to(tl.int64) * 4294967296 + (2147483647 - token)
        keys = tl.where(mask, keys, -0x7FFFFFFFFFFFFFFF)
        below = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for i in range(0, tl.minimum(wanted, select)):
            below = _next_best(keys, below)
            tl.store(chunk_best + place * select + i, below)


@triton.jit(do_not_specialize=["select", "max_entries"])
def merge_kernel(
    logits, token_ids, slots, num_logprobs, id_counts, id_table, chunk_max, chunk_sum, chunk_rank, chunk_best,
    sorted_ids, ids, logprobs, ranks, counts, row_stride, vocab, num_slots, table_width, select, max_entries, chunks,
    CHUNKS: tl.constexpr, MERGE: tl.constexpr, ENTRIES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, asked, wanted, listed = _wanted(slots, row, num_slots, num_logprobs, id_counts)
    entry = tl.arange(0, ENTRIES)
    token = tl.zeros([ENTRIES], tl.int32)
    value = tl.full([ENTRIES], float("-inf"), tl.float32)
    top = tl.full([], 0.0, tl.float32)
    log_mass = tl.full([], 0.0, tl.float32)
    rank = 0
    count = 0
    if asked:
        chunk = tl.arange(0, CHUNKS)
        mask = chunk < chunks
        tops = tl.load(chunk_max + row * chunks + chunk, mask=mask, other=float("-inf"))
        top = tl.max(tops, 0)
        sums = tl.load(chunk_sum + row * chunks + chunk, mask=mask, other=0.0)
        log_mass = tl.log(tl.sum(sums * weight_below(tops, top), 0))
        rank = tl.sum(tl.load(chunk_rank + row * chunks + chunk, mask=mask, other=0), 0)
        chosen = tl.load(token_ids + row)
        if listed > 0:
            number = tl.minimum(listed, tl.minimum(table_width, max_entries))
            given = (entry > 0) & (entry <= number)
            token = tl.load(id_table + slot * table_width + entry - 1, mask=given, other=0)
        else:
            number = tl.minimum(wanted, tl.minimum(max_entries, vocab))
            if SORTED:
                best = (entry > 0) & (entry <= number)
                token = tl.load(sorted_ids + row * vocab + entry - 1, mask=best, other=0).to(tl.int32)
            else:
                place = tl.arange(0, MERGE)
                have = (place < chunks * select) & (place % select < number)
                keys = tl.load(chunk_best + row * chunks * select + place, mask=have, other=-0x7FFFFFFFFFFFFFFF)
                below = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
                for i in range(0, number):
                    below = _next_best(keys, below)
                    token = tl.where(entry == i + 1, 2147483647 - (below & 0xFFFFFFFF).to(tl.int32), token)
        token = tl.where(entry == 0, chosen, token)
        value = _value(logits, row, row_stride, vocab, token)
        count = number + 1
    known = (token >= 0) & (token < vocab)
    logprob = tl.where(value == top, 0.0, value - top) - log_mass
    logprob = tl.where(value == float("-inf"), float("-inf"), logprob)
    valid = entry < count
    out = row * (max_entries + 1) + entry
    tl.store(ids + out, tl.where(valid & known, token, 0), mask=entry <= max_entries)
    tl.store(logprobs + out, tl.where(valid, logprob, 0.0), mask=entry <= max_entries)
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
    """See the package."""
    (rows, vocab), device, num_slots = logits.shape, logits.device, num_logprobs.numel()
    ids = torch.empty(rows, 1 + max_entries, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, 1 + max_entries, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids, logprobs, ranks, counts
    by_sort = max_entries > MAX_SELECT
    select = 0 if by_sort else max_entries
    chunks = triton.cdiv(vocab, CHUNK)
    chunk_max = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    chunk_sum = torch.empty_like(chunk_max)
    chunk_rank = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    chunk_best = torch.empty(rows, chunks, max(select, 1), dtype=torch.int64, device=device)
    sorted_ids = chunk_best
    if by_sort:
        clean = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        sorted_ids = clean.sort(dim=1, descending=True, stable=True).indices
    chunk_kernel[(rows, chunks)](
        logits, token_ids, slots, num_logprobs, id_counts, chunk_max, chunk_sum, chunk_rank, chunk_best,
        logits.stride(0), vocab, num_slots, select, BLOCK=CHUNK, num_warps=8,
    )  # fmt: skip
    merge_kernel[(rows,)](
        logits, token_ids, slots, num_logprobs, id_counts, id_table, chunk_max, chunk_sum, chunk_rank, chunk_best,
        sorted_ids, ids, logprobs, ranks, counts, logits.stride(0), vocab, num_slots, id_table.numel() // num_slots,
        select, max_entries, chunks, CHUNKS=triton.next_power_of_2(chunks),
        MERGE=triton.next_power_of_2(chunks * max(select, 1)), ENTRIES=triton.next_power_of_2(1 + max_entries),
        SORTED=by_sort, num_warps=4,
    )  # fmt: skip
    return ids, logprobs, ranks, counts
