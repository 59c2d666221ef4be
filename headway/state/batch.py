"""``StepBatch``: everything a forward pass may know about its step. Passed as an argument, never kept in a global."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

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
class CrossBatch:
    """What cross-attention reads: by token, since each sees all encoder outputs of its request.

    Attributes:
        block_tables: int32 [S, MB], slot -> blocks of the group.
        slots, lens: int32 [T], of each token its slot and that slot's encoder outputs; -1 and 0 on padding and zombie rows.
        starts: int32 [T + 1], 0, 1, ..., T.
        arrivals: int32 [T, KH], scratch, zero between kernels.
        max_len_bound: >= every length; sizes grids only.
    """

    block_tables: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    arrivals: torch.Tensor
    max_len_bound: int

    def picked(self, tokens: torch.Tensor) -> CrossBatch:
        """For these tokens alone, int32 [N]."""
        number = len(tokens)
        return replace(
            self,
            slots=self.slots.index_select(0, tokens),
            lens=self.lens.index_select(0, tokens),
            starts=self.starts[: number + 1],
            arrivals=self.arrivals[:number],
        )


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
        groups: one for each group of the model's ``CacheLayout``, but for that of cross-attention.
        arrivals: [R W, KH], scratch of the attention kernels, zero between them.
        num_decode_rows: leading rows with exactly one token; with ``decode_rows`` a bound.
        max_query_len: >= every row's tokens; sizes grids only.
        max_seq_len_bound: >= every seq_len; sizes grids only.
        width: W, outcomes that a row can have: 1, or with drafts one more than there are.
        token_types: [T], for models with several types of tokens; None: nobody reads them.
        adapters: [T], which adapter each token runs with, 0 for none; None: the model has none.
        media_rows: [T], row of the encoder cache that is a token's input, -1 for none; None: no token's.
        ends: [T], position up to which a token sees, see ``span_attention``; None: up to its own.
        places: [3, T], time, row and column of each token's rotation; None: its position is all three.
        cos_sin: f32 [T, Drot], rotation of each token, where it is no function of the position; ``positions`` are then the
            tokens' numbers in the step. None: layers have tables.
        decode_rows: [1], their true number in a step with prompts, see ``paged_attention``; None: ``num_decode_rows``.
        chunks: the packed step, in which kernels of states find the chunk table; None for models without states.
        max_chunks: >= the table's entries; sizes grids only.
        short: rows of so many tokens or fewer are in no chunk: W, also in steps without drafts.
        stored_at, store_at: [R], see ``replay_rows``; None: recurrent states are written by every row.
        reads_this_step: rows that look like decode rows may have keys of this very step, see ``paged_attention``.
        masks: what rules of models say of the step's decode rows, kept by whoever asked first (``attention.flex``).
        prefix_bound: >= the tokens before this step of all rows that make keys and values of cached latents (``core.latents``).
        selected: int32 [T, K], positions that an indexer chose for the layers that follow; None: there is none.
        max_copies: >= the states that are copied before the forward pass, and behind it; 0 in steps of decode rows alone.
        cross: what cross-attention reads; None where there is none.
        entering: [T, C], what the stage before has made of the tokens; None: this stage has the embedding.
        most_tokens: >= T on every replica that shares experts with this one, the same on all of them; 0: there are no others,
            or T is the same on all.
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
    adapters: torch.Tensor | None = None
    media_rows: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    places: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    chunks: torch.Tensor | None = None
    max_chunks: int = 0
    short: int = 1
    stored_at: torch.Tensor | None = None
    store_at: torch.Tensor | None = None
    max_copies: int = 0
    reads_this_step: bool = False
    masks: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    prefix_bound: int = 0
    selected: torch.Tensor | None = None
    most_tokens: int = 0
    entering: torch.Tensor | None = None

    def live_tokens(self, last_only: bool = False) -> torch.Tensor:
        """int32 [T], or with ``last_only`` [R] of the rows' last tokens: negative on padding and zombie rows."""
        if self.groups:
            live = self.groups[0].kv_slots
        else:  # of rows that cache nothing the lengths tell
            token = torch.arange(len(self.input_ids), dtype=torch.int32, device=self.input_ids.device)
            owner = torch.searchsorted(self.query_start, token, right=True) - 1
            lens = torch.cat((self.seq_lens, self.seq_lens.new_zeros(1)))
            live = lens.index_select(0, owner.clamp(0, len(self.seq_lens))) - 1
        return live.index_select(0, self.logit_indices).masked_fill_(self.row_slots < 0, -1) if last_only else live

    cross: CrossBatch | None = None

    def slice(self, first: int, end: int) -> StepBatch:
        """The step of tokens ``first`` to ``end`` alone, 0 <= first < end <= T. A row that is cut goes on in the next slice:
        what it has before ``first`` counts as context there, and what it has from ``end`` on is not yet cached here. So
        slices have to run in order, layer by layer or as a whole.

        All arithmetic is on the device: rows stay where they are, and those without tokens in the slice are padding. Nothing is
        written to tensors of this batch.

        ``logit_indices`` of rows that do not end in the slice mean nothing.
        """
        assert 0 <= first < end <= len(self.input_ids), "a slice is a part of the step"
        assert self.can_be_cut, "this step cannot be cut"
        decodes, rows = self.num_decode_rows, len(self.row_slots)
        first_row, end_row = min(first, decodes), rows if end > decodes else end  # decode rows have a token each
        own = slice(first_row, end_row)
        starts = self.query_start[first_row : end_row + 1]
        begin, behind = starts[:-1], starts[1:]
        here = (behind > first) & (begin < end)
        later = (behind - end).clamp_(min=0)  # tokens of the row behind the slice

        def lengths(seq_lens: torch.Tensor) -> torch.Tensor:
            return torch.where(here, (seq_lens[own] - later).clamp_(min=0), 0)

        lens = lengths(self.seq_lens)
        groups = tuple(
            GroupBatch(
                group.block_tables,
                group.kv_slots[first:end],
                lens if group.seq_lens is self.seq_lens else lengths(group.seq_lens),
            )
            for group in self.groups
        )
        return replace(
            self,
            input_ids=self.input_ids[first:end],
            positions=self.positions[first:end],
            query_start=starts.clamp(first, end) - first,
            seq_lens=lens,
            row_slots=torch.where(here, self.row_slots[own], -1),
            logit_indices=(self.logit_indices[own] - first).clamp(0, end - first - 1),
            groups=groups,
            arrivals=self.arrivals[own],
            num_decode_rows=max(0, min(end, decodes) - first),
            token_types=None if self.token_types is None else self.token_types[first:end],
            adapters=None if self.adapters is None else self.adapters[first:end],
            entering=None if self.entering is None else self.entering[first:end],
            masks={},
        )

    @property
    def can_be_cut(self) -> bool:
        """Whether ``slice`` knows all that the step has."""
        more = (self.media_rows, self.ends, self.places, self.cos_sin, self.selected, self.cross)
        return (
            self.width == 1 and self.chunks is None and self.decode_rows is None and all(each is None for each in more)
        )

    def of_last_tokens(self) -> StepBatch:
        """The step of each row's last token alone, T = R: all of them are decode rows then.

        Their keys may be those of this very step, which early launches must know.
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
            reads_this_step=True,
            masks={},
            prefix_bound=0,
            selected=None if self.selected is None else self.selected.index_select(0, last),
            cross=None if self.cross is None else self.cross.picked(last),
        )
