"""What ``gather_logprobs`` means, in torch."""

from __future__ import annotations

import torch


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_logprobs: torch.Tensor,
    id_counts: torch.Tensor,
    id_table: torch.Tensor,
    max_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (rows, vocab), num_slots, inf = logits.shape, num_logprobs.shape[0], float("inf")
    x = torch.nan_to_num(logits.to(torch.float32), nan=-inf, posinf=inf, neginf=-inf)
    in_table = (slots >= 0) & (slots < num_slots)
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    listed = id_counts.index_select(0, slot)
    wanted = num_logprobs.index_select(0, slot)
    asked = in_table & ((wanted >= 0) | (listed > 0))

    table = id_table.view(num_slots, -1).index_select(0, slot)[:, :max_entries]  # [N, min(I, M)]
    entries = torch.zeros(rows, 1 + max_entries, dtype=torch.int32, device=logits.device)
    entries[:, 0].copy_(token_ids)
    most = min(max_entries, vocab)
    entries[:, 1 : 1 + most].copy_(_top_ids(x, most))
    given = entries[:, 1 : 1 + table.shape[1]]
    given.copy_(torch.where(listed[:, None] > 0, table, given))
    number = torch.where(listed > 0, listed.clamp(max=table.shape[1]), wanted.clamp(0, most))
    counts = torch.where(asked, number + 1, 0).to(torch.int32)

    known = (entries >= 0) & (entries < vocab)
    value = x.gather(1, torch.where(known, entries, 0).to(torch.int64))  # [N, 1 + M]
    value = torch.where(known, value, -inf)
    top = x.amax(1, keepdim=True)
    mass = torch.where(x == top, 1.0, (x - top).exp()).sum(1, keepdim=True)
    # An infinite maximum has probability 1 / (how many there are); a row of -inf has no distribution at all.
    relative = torch.where(value == top, 0.0, value - top)
    logprobs = torch.where(value == -inf, -inf, relative - mass.log())
    valid = torch.arange(1 + max_entries, device=logits.device) < counts[:, None]
    ranks = torch.where(asked, (x >= value[:, :1]).sum(1), 0)
    return (
        torch.where(valid & known, entries, 0),
        torch.where(valid, logprobs, 0.0),
        ranks.to(torch.int32),
        counts,
    )


def _top_ids(x: torch.Tensor, most: int) -> torch.Tensor:
    """Ids int32 [N, most] of the largest of each row of x, f32 [N, V], descending, lower id first on ties.

    ``torch.topk`` promises no order among ties, and on integer keys, which have none, it is ten times slower. So: its
    ids above the last value, which are certain, and the lowest ids at the last value; then both sorted by (value, id).
    """
    if most == 0:
        return torch.zeros(x.shape[0], 0, dtype=torch.int32, device=x.device)
    vocab = x.shape[1]
    values, ids = x.topk(most, dim=1)
    last = values[:, -1:]
    backwards = torch.arange(vocab, 0, -1, dtype=torch.float32, device=x.device)  # exact: a vocabulary is below 2**24
    tied = torch.where(x == last, backwards, 0.0).topk(most, dim=1)
    ids = torch.cat((ids, tied.indices), 1)
    certain = torch.cat((values > last, tied.values > 0), 1)
    bits = (torch.cat((values, last.expand_as(values)), 1) + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) * (1 << 32) + (vocab - 1 - ids)  # orders as the floats
    best = torch.where(certain, key, torch.iinfo(torch.int64).min).topk(most, dim=1).values
    return (vocab - 1 - (best & 0xFFFFFFFF)).to(torch.int32)
