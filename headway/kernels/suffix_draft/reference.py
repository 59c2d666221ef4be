"""What ``suffix_draft`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import gather_rows, masked_write_

PARTS = 32
OFF, OWN, SHARED = 0, 1, 2
SLACK = 1e-6
"""Products of shares are compared with a bound: rounding shall not decide."""


def suffix_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    scope: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    store: torch.Tensor,
    cursor: torch.Tensor,
    max_match: int,
    factor: float,
    min_prob: float,
) -> None:
    (num_slots, length), number, size = history.shape, drafts.shape[1], store.shape[0]
    inside = (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(inside, row_slots, 0).to(torch.int64)
    known = num_tokens.index_select(0, slot).clamp(max=length)  # [R]
    reach = scope.index_select(0, slot)
    real = inside & (known > 0) & (reach != OFF)
    text = history.index_select(0, slot)  # [R, L]
    row = torch.arange(len(slot), device=history.device)
    last = [gather_rows(text, row, known - 1 - back) for back in range(max_match)]
    enough = [known > back for back in range(max_match)]

    place = torch.arange(size, device=history.device)
    usable = _live(place, cursor, size) & (torch.roll(store, -1) >= 0)
    usable = (reach == SHARED)[:, None] & usable  # [R, T]
    shared = _matched(store.expand(len(slot), size), usable, last, enough, wraps=True)
    place = torch.arange(length, device=history.device)
    own = _matched(text, place < (known - 1)[:, None], last, enough, wraps=False)
    best = torch.cat(
        (_candidates(shared, torch.full_like(known, size)), _candidates(own, known - 1)), 1
    )  # [R, 2 PARTS]

    most = (best >> 32).amax(1)
    votes = ((best >> 32) == most[:, None]) & (most >= 1)[:, None]
    at = best & 0xFFFFFFFF
    index = torch.arange(2 * PARTS, device=history.device)
    period = (known[:, None] - 1 - at).clamp(min=1)
    limit = (factor * most.to(torch.float64) + SLACK).to(torch.int64)
    going, chance = real & (most >= 1), torch.ones(len(slot), device=history.device)
    for i in range(number):
        theirs = gather_rows(text, row[:, None].expand(at.shape), at + 1 + i % period)
        token = torch.where(index < PARTS, store.take((at + 1 + i) % size), theirs)
        able = votes & (token >= 0)
        shares = ((token[:, :, None] == token[:, None, :]) & able[:, :, None] & able[:, None, :]).sum(2)  # [R, 2 PARTS]
        key = torch.where(able, shares * 2 * PARTS + index, -1)
        top, chosen = key.amax(1), token.gather(1, key.argmax(1, keepdim=True))[:, 0]
        chance = chance * (top // (2 * PARTS)) / votes.sum(1).clamp(min=1)
        going = going & (top >= 0) & (i < limit) & (chance >= min_prob - SLACK)
        masked_write_(drafts, slot * number + i, torch.where(going, chosen, last[0]).to(torch.int32), real)
        votes = able & (token == chosen[:, None])


def _live(place: torch.Tensor, cursor: torch.Tensor, size: int) -> torch.Tensor:
    """bool [T], places that hold a token of one of the newest answers."""
    written, count, kept = cursor[0], cursor[1], cursor.shape[0] - 2
    when = written - 1 - torch.remainder(written - 1 - place, size)
    oldest = cursor.take((2 + torch.remainder((count - kept).clamp(min=0), kept)).view(1))
    return (when >= 0) & (when >= oldest)


def _matched(
    text: torch.Tensor, usable: torch.Tensor, last: list[torch.Tensor], enough: list[torch.Tensor], *, wraps: bool
) -> torch.Tensor:
    """int64 [R, N]: matched tokens << 32 | place of each usable place of text, int32 [R, N]; -1 where none are."""
    place = torch.arange(text.shape[1], device=text.device)
    equal, matched = usable, torch.zeros_like(text, dtype=torch.int64)
    for back, (token, is_there) in enumerate(zip(last, enough, strict=True)):
        equal = equal & is_there[:, None] & (torch.roll(text, back, 1) == token[:, None])
        if not wraps:
            equal = equal & (place >= back)
        elif back >= text.shape[1]:
            equal = torch.zeros_like(equal)
        matched = matched + equal.to(torch.int64)
    return torch.where(matched > 0, (matched << 32) + place, -1)


def _candidates(scores: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """int64 [R, PARTS], the largest of the scores, int64 [R, N], in each part of the first ``number`` ones, int [R]."""
    share = ((number + PARTS - 1) // PARTS).clamp(min=1)
    part = torch.arange(scores.shape[1], device=scores.device)[None] // share[:, None]
    scores = torch.where(part < PARTS, scores, -1)
    empty = torch.full((len(scores), PARTS), -1, dtype=torch.int64, device=scores.device)
    return empty.scatter_reduce(1, part.clamp(max=PARTS - 1), scores, "amax")
