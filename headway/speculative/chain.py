"""A chain of drafts: a small model draws one token a row, K times, each from the one before.

The model's keys lie in a pool of its own, in the blocks that the target's block tables name. So they live as long as the
target's, and what holds for these (prefix hits, chunks, preemption) holds for them, too.

Draws are those of the target, with its noise: of two distributions that are alike the same token comes, so that more drafts
are accepted than if each were the most likely token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.core.cache import CacheKind, CacheLayout
from headway.core.errors import ConfigError
from headway.kernels.chain_unpack import chain_unpack
from headway.kernels.sample import PENALTIES, sample
from headway.speculative.base import DraftHouse
from headway.speculative.rejection import Rejection
from headway.state.batch import GroupBatch, StepBatch
from headway.state.cache_pool import CachePool


def shared_group(target: CacheLayout, own: CacheLayout) -> int:
    """The target's group whose blocks a drafter's layers share: one that keeps every token.

    Raises:
        ConfigError: there is none, or the drafter has layers of several kinds.
    """
    has_states = own.has_states or any(spec is not None and spec.kind is CacheKind.STATE for spec in own.layers)
    if len(own.groups) != 1 or own.groups[0].kind is not CacheKind.FULL or has_states:
        raise ConfigError(
            "speculative_config: the drafter must keep every token in all of its layers; take another one"
        )
    for number, group in enumerate(target.groups):
        if group.kind is CacheKind.FULL:
            return number
    raise ConfigError(
        "speculative_config: no layer of the model keeps every token, so there are no blocks for a drafter's keys; "
        'use method="ngram"'
    )


class Chain:
    """Steps of one token a row.

    Args:
        layout: of the drafter's caches.
        first: position of link 0 less the number of known tokens.

    Attributes:
        caches: of the drafter.
        rejection: draws and judges by the drafter's distribution, where the house asks for that.
    """

    def __init__(self, house: DraftHouse, layout: CacheLayout, first: int) -> None:
        device = house.arena.ints.device
        self._house, self._first, self._group = house, first, shared_group(house.target.spec.cache, layout)
        self.rejection: Rejection | None = None
        if house.drawing == "probabilistic":
            self.rejection = Rejection(house.arena, house.sampler, house.number, house.target.spec.vocab_size)
        self.caches = CachePool(
            layout, num_blocks=house.num_blocks, block_size=house.block_size, dtype=house.kv_dtype, device=device
        )
        view = house.arena.view
        self._drafts = view("drafts").view(house.arena.num_slots, house.number)
        names = ("history", "num_tokens", "num_computed", "alive")
        self._tables = tuple(view(name) for name in names)
        block_table = view("block_table")
        self._block_table = block_table if block_table.dim() == 2 else block_table[self._group]
        self._rows = torch.zeros(4, house.max_rows, dtype=torch.int32, device=device)
        self._query_start = torch.arange(house.max_rows + 1, dtype=torch.int32, device=device)
        most_tokens = house.max_rows * (house.number + 1)
        self._arrivals = torch.zeros(most_tokens, layout.num_heads, dtype=torch.int32, device=device)
        draw = ("temperature", "top_k", "top_p", "min_p", "seeds")
        self._draw, self._num_tokens = tuple(view(name) for name in draw), view("num_tokens")

    def whole(self, batch: StepBatch) -> StepBatch:
        """The target's step, for the drafter's layers."""
        groups = (batch.groups[self._group],)
        return replace(batch, groups=groups, arrivals=self._arrivals[: len(batch.row_slots) * batch.width])

    def link(self, batch: StepBatch, token_ids: torch.Tensor, link: int) -> StepBatch:
        """The rows that draw draft ``link``; draft ``link`` - 1, ``token_ids`` int32 [R], is kept. Behind the last one nothing
        is to be run.
        """
        rows, block_size = len(batch.row_slots), self._house.block_size
        input_ids, positions, kv_slots, seq_lens = self._rows[:, :rows].unbind()
        chain_unpack(
            self._drafts, batch.row_slots, token_ids, *self._tables, self._block_table, input_ids, positions, kv_slots,
            seq_lens, block_size, link, self._first,
        )  # fmt: skip
        starts = self._query_start[: rows + 1]
        return StepBatch(
            input_ids=input_ids,
            positions=positions,
            query_start=starts,
            seq_lens=seq_lens,
            row_slots=batch.row_slots,
            logit_indices=starts[:-1],
            groups=(GroupBatch(self._block_table, kv_slots, seq_lens),),
            arrivals=self._arrivals[:rows],
            num_decode_rows=rows,
            max_query_len=1,
            max_seq_len_bound=batch.max_seq_len_bound + 2 * self._house.number + 1,
        )

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, link: int, flags: int) -> torch.Tensor:
        """int32 [R], draft ``link`` of each row, from logits [R, V]: with the noise that its position will be drawn with, the
        most likely token, or from their distribution: as the house has it."""
        positions = self._num_tokens + link
        if self.rejection is not None:
            return self.rejection.draw(logits, slots, positions, link, flags)
        if self._house.drawing == "greedy":
            flags = 0
        penalties = self._house.sampler.penalties.tensors
        tokens: torch.Tensor = sample(logits, slots, *self._draw, positions, *penalties, flags & ~PENALTIES)
        return tokens.clamp_(min=0)  # -1: nothing could be drawn
