"""``StepBatch``: everything a forward pass may know about its step. Passed as an argument, never kept in a global."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch

from headway.core.chunks import CHUNK, CHUNKS_AT, most_chunks
from headway.state.packed_step import HEADER_INTS


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

    def slice(self, first: int, end: int) -> CrossBatch:
        """For tokens ``first`` to ``end`` alone."""
        starts, arrivals = self.starts[: end - first + 1], self.arrivals[: end - first]
        return replace(self, slots=self.slots[first:end], lens=self.lens[first:end], starts=starts, arrivals=arrivals)

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
        chunks: the packed step, in which kernels of states find the chunk table, or what stands for it in a slice; None for
            models without states.
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
        halved: the step runs as two slices.
        is_slice: it is a part of a step: states are copied, and rings are told where states stand, for all of it at once.
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
    halved: bool = False
    is_slice: bool = False

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
        slices have to run in order, layer by layer or as a whole. What the next slice reads of such a row was written in this
        very step, so steps of short rows alone, whose kernels may read earlier tokens before those of this step are there, are
        cut between rows (``slice_rows``). Behind ``load_states``.

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

        lens, query_start = lengths(self.seq_lens), starts.clamp(first, end) - first
        stored_at, store_at = self._stored_in(range(first_row, end_row), lens, lens - query_start.diff())
        chunks, max_chunks = self._chunks_of(query_start, end - first)
        return replace(
            self,
            input_ids=self.input_ids[first:end],
            positions=self.positions[first:end],
            query_start=query_start,
            seq_lens=lens,
            row_slots=torch.where(here, self.row_slots[own], -1),
            logit_indices=(self.logit_indices.view(self.width, -1)[:, own] - first).clamp(0, end - first - 1).flatten(),
            groups=self._groups_of(lambda slots: slots[first:end], lengths, lens),
            arrivals=self.arrivals[first_row * self.width : end_row * self.width],
            num_decode_rows=max(0, min(end, decodes) - first),
            token_types=None if self.token_types is None else self.token_types[first:end],
            adapters=None if self.adapters is None else self.adapters[first:end],
            media_rows=None if self.media_rows is None else self.media_rows[first:end],
            places=None if self.places is None else self.places[:, first:end],
            entering=None if self.entering is None else self.entering[first:end],
            cross=None if self.cross is None else self.cross.slice(first, end),
            chunks=chunks,
            max_chunks=max_chunks,
            stored_at=stored_at,
            store_at=store_at,
            prefix_bound=self.prefix_bound + min(first, self.max_query_len - 1),  # and what the cut row has in front
            masks={},
            is_slice=True,
        )

    def slice_rows(self, first: int, end: int) -> StepBatch:
        """The step of rows ``first`` to ``end`` alone, 0 <= first <= end <= R, all of which are short (``max_query_len`` <=
        ``short``), padded: the host knows where rows begin by a bound alone. Their tokens are gathered. Behind
        ``load_states``; nothing is written to tensors of this batch.
        """
        assert self.can_be_cut and self.max_query_len <= self.short, "this step cannot be cut between rows"
        device, total, number = self.row_slots.device, len(self.input_ids), max(end - first, 1)
        row = first + torch.arange(number + 1, dtype=torch.int32, device=device)
        starts = self.query_start.index_select(0, row.clamp(max=end))
        row, has_row = row[:-1].clamp(max=len(self.row_slots) - 1), row[:-1] < end
        most = max(min((end - first) * self.max_query_len, total), 1)
        token = starts[0] + torch.arange(most, dtype=torch.int32, device=device)
        here, token = token < starts[-1], token.clamp(max=total - 1)

        def tokens(x: torch.Tensor, other: int) -> torch.Tensor:
            return torch.where(here, x.index_select(-1, token), other)

        def rows(x: torch.Tensor, other: int) -> torch.Tensor:
            return torch.where(has_row, x.index_select(0, row), other)

        lens, last = rows(self.seq_lens, 0), self.logit_indices.view(self.width, -1).index_select(1, row)
        return replace(
            self,
            input_ids=tokens(self.input_ids, 0),
            positions=tokens(self.positions, 0),
            query_start=starts - starts[0],
            seq_lens=lens,
            row_slots=rows(self.row_slots, -1),
            logit_indices=(last - starts[0]).clamp(0, most - 1).flatten(),
            groups=self._groups_of(lambda slots: tokens(slots, -1), lambda each: rows(each, 0), lens),
            arrivals=self.arrivals[first * self.width :][: number * self.width]
            if end > first
            else self.arrivals[: self.width],
            num_decode_rows=max(0, min(first + number, self.num_decode_rows) - first),
            token_types=None if self.token_types is None else tokens(self.token_types, 0),
            adapters=None if self.adapters is None else tokens(self.adapters, 0),
            media_rows=None if self.media_rows is None else tokens(self.media_rows, -1),
            places=None if self.places is None else tokens(self.places, 0),
            entering=None if self.entering is None else self.entering.index_select(0, token),
            cross=None if self.cross is None else self.cross.picked(token),
            max_chunks=0,
            stored_at=None if self.stored_at is None else rows(self.stored_at, 0),
            store_at=None if self.store_at is None else rows(self.store_at, -1),
            masks={},
            is_slice=True,
        )

    def _groups_of(
        self,
        tokens: Callable[[torch.Tensor], torch.Tensor],
        rows: Callable[[torch.Tensor], torch.Tensor],
        lens: torch.Tensor,
    ) -> tuple[GroupBatch, ...]:
        """Of a slice whose own ``kv_slots`` and ``seq_lens`` these two make; ``lens``: what ``rows`` makes of the step's."""
        return tuple(
            GroupBatch(
                group.block_tables,
                tokens(group.kv_slots),
                lens if group.seq_lens is self.seq_lens else rows(group.seq_lens),
            )
            for group in self.groups
        )

    def _chunks_of(self, query_start: torch.Tensor, tokens: int) -> tuple[torch.Tensor | None, int]:
        """The chunk table of the rows of a slice of so many tokens, int32 [R + 1], where kernels look for one in the packed
        step; and a bound on its entries."""
        most = most_chunks(tokens, len(query_start) - 1, self.max_query_len, self.short)
        if self.chunks is None or not most:
            return self.chunks, 0
        lens = query_start.diff()
        counts = torch.where(lens > self.short, (lens + (CHUNK - 1)) // CHUNK, 0)
        behind = counts.cumsum(0)
        entry = torch.arange(most, device=lens.device)
        row = torch.searchsorted(behind, entry, right=True).clamp_(max=len(lens) - 1)
        found = torch.zeros(HEADER_INTS + 2 * most, dtype=torch.int32, device=lens.device)
        found[CHUNKS_AT : CHUNKS_AT + 1].fill_(HEADER_INTS)
        found[CHUNKS_AT + 1 : CHUNKS_AT + 2].copy_(behind[-1:])
        nth = entry - (behind - counts).index_select(0, row)
        found[HEADER_INTS:].view(most, 2).copy_(torch.stack((row, nth), 1))
        return found, most

    def _stored_in(
        self, rows: range, lens: torch.Tensor, begins: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``stored_at`` and ``store_at`` of ``rows`` in a slice where they have tokens from ``begins`` to ``lens``,
        int32 [R'] each. A state that the row stores further on is stored where the slice ends, and one that it has stored
        before is what the slice goes on from: but that of drafts, which is certain behind the first of them alone.
        """
        if self.stored_at is None or self.store_at is None:
            return None, None
        low, high = rows.start, rows.stop
        stored, store = self.stored_at[low:high], self.store_at[low:high]
        first = self.seq_lens[low:high] - self.query_start[low : high + 1].diff()
        live = lens > begins
        stored = torch.where((begins > first) & (store >= 0), torch.minimum(store, begins), stored)
        store = torch.where(store > begins, torch.minimum(store, lens), -1)
        return torch.where(live, stored, 0), torch.where(live, store, -1)

    @property
    def can_be_cut(self) -> bool:
        """Whether slices know all that the step has: not what is said of the rows that decode on the device alone, nor tokens
        that see later ones."""
        return self.decode_rows is None and self.ends is None and self.cos_sin is None and self.selected is None

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
