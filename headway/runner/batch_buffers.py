"""Device memory that each step's batch is expanded into: allocated once, so that graphs find it at the same address."""

from __future__ import annotations

import torch

from headway.core.cache import CacheLayout
from headway.core.chunks import most_chunks
from headway.core.ints import round_up
from headway.kernels.cross_rows import cross_rows
from headway.kernels.step_unpack import step_unpack
from headway.state.batch import CrossBatch, GroupBatch, StepBatch
from headway.state.packed_step import DECODE_ROWS_AT
from headway.state.slots import ENCODER_LEN, SlotArena


class BatchBuffers:
    """Buffers of a ``StepBatch`` of up to ``max_tokens`` tokens and ``max_rows`` rows.

    One set is enough: steps run in order on one stream, and only the device reads them.

    Args:
        width: most tokens of a decode row, drafts included.
        replays: recurrent states have rings of inputs.
    """

    def __init__(
        self,
        arena: SlotArena,
        max_tokens: int,
        max_rows: int,
        block_size: int,
        layout: CacheLayout,
        width: int = 1,
        replays: bool = False,
    ) -> None:
        device = arena.ints.device
        self._width = width
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None
        if replays:
            stored_at, store_at = torch.zeros(2, round_up(max_rows, 4), dtype=torch.int32, device=device).unbind()
            self._stored = stored_at, store_at
        cross = layout.cross
        # A model without caches has a block table all the same; the last one is that of cross-attention, which writes by jobs.
        self._num_groups = max(len(layout.groups) - (cross is not None), 1)
        # Rows begin at multiples of 16 bytes, on which kernels are specialised.
        rows = 2 + self._num_groups
        self._tokens = torch.zeros(rows, round_up(max_tokens, 4), dtype=torch.int32, device=device)
        self._rows = torch.zeros(2 + width, round_up(max_rows, 4), dtype=torch.int32, device=device)
        self._logit_indices = self._rows[2:].view(-1)
        self._arrivals = torch.zeros(max_rows * width, layout.num_heads, dtype=torch.int32, device=device)
        self._query_start = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._history, self._block_tables = arena.view("history"), arena.view("block_table")
        self._cross: CrossBatch | None = None
        if cross is not None:
            slots, lens = torch.zeros(2, round_up(max_tokens, 4), dtype=torch.int32, device=device).unbind()
            self._cross = CrossBatch(
                self._block_tables[-1],
                slots,
                lens,
                torch.arange(max_tokens + 1, dtype=torch.int32, device=device),
                torch.zeros(max_tokens, layout.num_heads, dtype=torch.int32, device=device),
                cross.tokens,
            )
            self._encoder_lens = arena.view(ENCODER_LEN)
            self._block_tables = self._block_tables[:-1]
            if self._num_groups == 1:
                self._block_tables = self._block_tables[0]
        self._tables_of = self._block_tables.unbind() if self._num_groups > 1 else (self._block_tables,)
        self._num_computed, self._alive = arena.view("num_computed"), arena.view("alive")
        self._drafted: tuple[torch.Tensor, ...] = ()
        if width > 1:
            self._drafted = arena.view("num_tokens"), arena.view("drafts").view(arena.num_slots, -1)
        self._block_size = block_size
        self._has_states = layout.has_states

    def row_slots(self, number: int) -> torch.Tensor:
        """int32 [number], of the step that was unpacked last."""
        return self._rows[1, :number]

    def unpack(
        self,
        packed: torch.Tensor,
        *,
        num_tokens: int,
        num_rows: int,
        num_decode_rows: int,
        max_query_len: int,
        max_seq_len_bound: int,
        counted: bool = True,
        width: int = 1,
        max_prompts: int = 0,
    ) -> StepBatch:
        """Expand the packed step (int32 [P] on the device) into a batch of ``num_tokens`` x ``num_rows``, padding included.

        Args:
            num_decode_rows: ``num_rows``, or a bound with room for all but ``num_rows - num_decode_rows`` rows of the step.
            counted: attention reads the true number of decode rows from the packed step; if not, ``num_decode_rows`` is it.
            width: outcomes that rows can have; above 1, drafts follow the known tokens of rows that continue.
            max_prompts: >= the rows that do not continue a generation.
        """
        seq_lens, kv_slots = self._rows[0, :num_rows], self._tokens[2:, :num_tokens]
        groups = zip(self._tables_of, kv_slots.unbind(), strict=True)
        batch = StepBatch(
            input_ids=self._tokens[0, :num_tokens],
            positions=self._tokens[1, :num_tokens],
            query_start=self._query_start[: num_rows + 1],
            seq_lens=seq_lens,
            row_slots=self._rows[1, :num_rows],
            logit_indices=self._logit_indices[: width * num_rows],
            groups=tuple(GroupBatch(tables, slots, seq_lens) for tables, slots in groups),
            arrivals=self._arrivals[: num_rows * width],
            num_decode_rows=num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len_bound=max_seq_len_bound,
            width=width,
            chunks=packed if self._has_states else None,
            max_chunks=most_chunks(num_tokens, num_rows, max_query_len, self._width) if self._has_states else 0,
            max_copies=max_prompts if self._has_states else 0,
            short=self._width,
            stored_at=None if self._stored is None else self._stored[0][:num_rows],
            store_at=None if self._stored is None else self._stored[1][:num_rows],
            decode_rows=packed[DECODE_ROWS_AT : DECODE_ROWS_AT + 1] if counted and num_decode_rows < num_rows else None,
        )
        step_unpack(
            packed,
            self._history,
            self._num_computed,
            self._alive,
            self._block_tables,
            batch.input_ids,
            batch.positions,
            kv_slots if self._num_groups > 1 else batch.groups[0].kv_slots,
            batch.query_start,
            batch.seq_lens,
            batch.row_slots,
            batch.logit_indices,
            self._block_size,
            max_query_len,
            *(self._drafted if width > 1 else ()),
        )
        if self._cross is not None:
            batch.cross = self._cross_of(batch, self._cross, num_tokens)
        return batch

    def _cross_of(self, batch: StepBatch, whole: CrossBatch, num_tokens: int) -> CrossBatch:
        """Of a step of ``num_tokens``."""
        parts = whole.slots[:num_tokens], whole.lens[:num_tokens]
        cross_rows(batch.query_start, batch.row_slots, batch.seq_lens, self._encoder_lens, *parts)
        starts, arrivals = whole.starts[: num_tokens + 1], whole.arrivals[:num_tokens]
        return CrossBatch(whole.block_tables, *parts, starts, arrivals, whole.max_len_bound)
