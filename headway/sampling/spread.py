"""Logits that are spread over ranks: each rank has those of its part of the vocabulary."""

from __future__ import annotations

import torch

from headway.parallel.shard import VocabularyPart
from headway.sampling.draw import Draw


class SpreadLogits:
    """Draws from logits [N, P] of which each rank has P columns, those beyond the vocabulary included.

    All ranks draw the same token, since all decide on the same numbers.
    """

    def __init__(self, part: VocabularyPart) -> None:
        self._part = part

    def best(self, logits: torch.Tensor, slots: torch.Tensor, draw: Draw) -> torch.Tensor:
        """int32 [N], each row's largest logit, the lowest token on ties: two numbers of each rank and row are exchanged."""
        part = self._part
        if part.own:
            own = logits if part.own == part.rows else logits[:, : part.own].contiguous()
            local = draw.apply(own, slots, 0)
            there = local.clamp(0, part.own - 1)  # rehearsals leave launches out, so there may be anything
            value = own.gather(1, there[:, None].long()).float().masked_fill_(local[:, None] < 0, float("-inf"))
        else:
            there = torch.zeros_like(slots)
            value = torch.full_like(slots, float("-inf"), dtype=torch.float32)[:, None]
        both = torch.cat([value.view(torch.int32), (there + part.first)[:, None]], dim=1)  # [N, 2]
        found = part.group.all_gather(both)  # [ranks, N, 2]
        values, tokens = found[:, :, 0].view(torch.float32), found[:, :, 1]
        rank = values.argmax(0, keepdim=True)  # the first of equals: its tokens come before those of later ranks
        best = values.gather(0, rank)[0]
        token = torch.where(best > float("-inf"), tokens.gather(0, rank)[0], -1)
        return torch.where(slots >= 0, token, 0).to(torch.int32)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V]: every rank has all columns."""
        part = self._part
        found = part.group.all_gather(logits)  # [ranks, N, P]
        rows = found.transpose(0, 1).reshape(logits.shape[0], -1)
        return rows[:, : part.whole].contiguous()
