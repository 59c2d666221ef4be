"""What ``speech_rules`` means, in torch. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import forbid_

NOTHING = float("-inf")


def speech_rules(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    numbers: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    vocab, num_slots = logits.shape[1], numbers.shape[0]
    known = (slots >= 0) & (slots < num_slots)
    slot = torch.where(known, slots, 0).long()
    on, never, count, first, end, initial = numbers.index_select(0, slot).unbind(1)
    on = known & (on > 0)
    length, begin = num_tokens.index_select(0, slot), prompt_len.index_select(0, slot)
    fresh = length <= begin
    listed, column = ids.index_select(0, slot), torch.arange(ids.shape[1], device=ids.device)
    wanted = on[:, None] & (column < torch.where(fresh, count, never)[:, None]) & (listed >= 0) & (listed < vocab)
    forbid_(logits, listed, wanted)

    timed = on & (first >= 0)
    told, place = history.index_select(0, slot), torch.arange(history.shape[1], device=history.device)
    generated = (place >= begin[:, None]) & (place < length[:, None])
    latest = torch.where(generated & (told >= first[:, None]), told, -1).amax(1)
    last = _at(told, length - 1)
    before = _at(told, length - 2)
    ends_in_time = ~fresh & (last >= first)
    closed = (length - begin < 2) | (before >= first)
    token = torch.arange(vocab, device=logits.device)[None, :]
    is_time = token >= first[:, None]
    least = torch.where(ends_in_time & ~closed, latest, latest + 1)
    forbidden = fresh[:, None] & (~is_time | ((initial >= 0)[:, None] & (token > (first + initial)[:, None])))
    forbidden |= (ends_in_time & closed)[:, None] & is_time
    forbidden |= (ends_in_time & ~closed)[:, None] & (token < end[:, None])
    forbidden |= (latest >= 0)[:, None] & is_time & (token < least[:, None])
    edited = logits.float().masked_fill(forbidden, NOTHING)
    times = torch.logsumexp(edited.masked_fill(~is_time, NOTHING), 1)
    text = edited.masked_fill(is_time, NOTHING).amax(1)
    forbidden |= (times > text)[:, None] & ~is_time
    logits.masked_fill_(forbidden & timed[:, None], NOTHING)


def _at(history: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The token at ``place`` of each row; of the first place where it is negative."""
    return history.gather(1, place.clamp(0, history.shape[1] - 1).long()[:, None])[:, 0]
