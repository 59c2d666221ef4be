"""What ``bad_words`` means, in torch: all phrase tokens of a row at once, mismatches counted by a running sum."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import forbid_, gather_rows


def bad_words(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    bw_counts: torch.Tensor,
    bw_offsets: torch.Tensor,
    bw_tokens: torch.Tensor,
) -> None:
    vocab, (num_slots, length), width = logits.shape[1], history.shape, bw_tokens.shape[1]
    in_table = (slots >= 0) & (slots < num_slots)
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    offsets = bw_offsets.index_select(0, slot)  # [N, B + 1]
    tokens = bw_tokens.index_select(0, slot)  # [N, M]
    known = num_tokens.index_select(0, slot)[:, None]
    generated = known - prompt_len.index_select(0, slot)[:, None]
    begin, end = offsets[:, :-1], offsets[:, 1:]  # [N, B]
    phrase = torch.arange(begin.shape[1], device=slots.device)
    used = in_table[:, None] & (phrase < bw_counts.index_select(0, slot)[:, None])
    used &= (begin >= 0) & (end > begin) & (end <= width) & (end - begin - 1 <= generated)

    # The phrase of each token. Offsets past the used ones are stale: they must not break the order that searchsorted
    # needs.
    ends = torch.where(phrase < bw_counts.index_select(0, slot)[:, None], end, width).contiguous()
    place = torch.arange(width, device=slots.device, dtype=ends.dtype).expand(tokens.shape).contiguous()
    owner = torch.searchsorted(ends, place, right=True).clamp(max=begin.shape[1] - 1)
    end_of_token = ends.gather(1, owner)
    last = place == end_of_token - 1
    position = known + place - (end_of_token - 1)  # of the generated token that it must equal
    position = torch.where((position >= 0) & (position < length), position, 0)
    matches = last | (gather_rows(history, slot[:, None].expand(tokens.shape), position) == tokens)
    mismatches = torch.nn.functional.pad((~matches).to(torch.int32).cumsum(1), (1, 0))  # [N, M + 1], before each place
    clean = mismatches.gather(1, end.clamp(0, width).to(torch.int64)) == mismatches.gather(
        1, begin.clamp(0, width).to(torch.int64)
    )
    final = gather_rows(bw_tokens, slot[:, None].expand(end.shape), end - 1)
    forbid_(logits, final, used & clean & (final >= 0) & (final < vocab))
