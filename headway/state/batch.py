"""``StepBatch``: everything a forward pass may know about its step. Passed as an argument, never kept in a global."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(slots=True)
class GroupBatch:
    """What a step's layers of one cache group read.

    Attributes:
        block_tables: [S, MB], slot -> blocks of the group; 0 is the null block, also where a block has been given back.
        kv_slots: [T], block * block_size + offset of each token's KV; -1 writes nothing (padding, zombie rows).
        seq_lens: [R], tokens of each row that the group has, this step's included; 0 on padding and zombie rows.
    """

    block_tables: torch.Tensor
    kv_slots: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(slots=True)
class StepBatch:
    """One step on the device. T = padded tokens, R = padded rows, S = slots, MB = blocks per sequence.

    All tensors are int32 on the engine's device, but for ``arrivals`` filled by ``step_unpack``; the host never reads them.

    Attributes:
        input_ids: [T]; 0 on padding.
        positions: [T]; 0 on padding.
        query_start: [R + 1], first token of each row.
        seq_lens: [R], context length including this step's tokens; 0 on padding and zombie rows.
        row_slots: [R], batch row -> slot; -1 on padding.
        logit_indices: [R], batch row -> its last token. With drafts [W R]: for each outcome and row the token that leads to it.
        groups: one for each group of the model's ``CacheLayout``.
        arrivals: [R, KH], scratch of the attention kernels, zero between them.
        num_decode_rows: leading rows with exactly one token; with ``decode_rows`` a bound.
        max_query_len: >= every row's tokens; sizes grids only.
        max_seq_len_bound: >= every seq_len; sizes grids only.
        width: W, outcomes that a row can have: 1, or with drafts one more than there are.
        token_types: [T], for models with several types of tokens; None: nobody reads them.
        decode_rows: [1], their true number in a step with prompts, see ``paged_attention``; None: ``num_decode_rows``.
        chunks: the packed step, in which kernels of states find the chunk table; None for models without states.
        max_chunks: >= the table's entries; sizes grids only.
        max_copies: >= the states that are copied before the forward pass, and behind it; 0 in steps of decode rows alone.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    row_slots: torch.Tensor
    logit_indices: torch.Tensor
    groups: tuple[GroupBatch, ...]
    arrivals: torch.Tensor
    num_decode_rows: int
    max_query_len: int
    max_seq_len_bound: int
    decode_rows: torch.Tensor | None = None
    width: int = 1
    token_types: torch.Tensor | None = None
    chunks: torch.Tensor | None = None
    max_chunks: int = 0
    max_copies: int = 0

    def of_last_tokens(self) -> StepBatch:
        """The step of each row's last token alone, T = R: all of them are decode rows then.

        Their keys may be those of this very step, which early launches must know (``PagedAttention.attend_last``).
        """
        rows, last = len(self.row_slots), self.logit_indices
        starts = torch.arange(rows + 1, dtype=torch.int32, device=last.device)
        padding = self.row_slots < 0
        groups = tuple(
            replace(group, kv_slots=group.kv_slots.index_select(0, last).masked_fill_(padding, -1))
            for group in self.groups
        )
        return replace(
            self,
            input_ids=self.input_ids.index_select(0, last),
            positions=self.positions.index_select(0, last),
            groups=groups,
            query_start=starts,
            logit_indices=starts[:-1],
            num_decode_rows=rows,
            max_query_len=1,
            decode_rows=None,
        )
