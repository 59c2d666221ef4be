"""Device memory that each step's batch is expanded into: allocated once, so that graphs find it at the same address."""

from __future__ import annotations

import torch

from headway.kernels.step_unpack import step_unpack
from headway.state.batch import StepBatch
from headway.state.packed_step import DECODE_ROWS_AT
from headway.state.slots import SlotArena


class BatchBuffers:
    """Buffers of a ``StepBatch`` of up to ``max_tokens`` tokens and ``max_rows`` rows.

    One set is enough: steps run in order on one stream, and only the device reads them.
    """

    def __init__(self, arena: SlotArena, max_tokens: int, max_rows: int, block_size: int, kv_heads: int) -> None:
        device = arena.ints.device
        self._tokens = torch.zeros(3, max_tokens, dtype=torch.int32, device=device)
        self._rows = torch.zeros(3, max_rows, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device)
        self._query_start = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._history, self._block_tables = arena.view("history"), arena.view("block_table")
        self._num_computed, self._alive = arena.view("num_computed"), arena.view("alive")
        self._block_size = block_size

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
    ) -> StepBatch:
        """Expand the packed step (int32 [P] on the device) into a batch of ``num_tokens`` x ``num_rows``, padding included.

        Args:
            num_decode_rows: ``num_rows``, or a bound with room for all but ``num_rows - num_decode_rows`` rows of the step.
            counted: attention reads the true number of decode rows from the packed step; if not, ``num_decode_rows`` is it.
        """
        batch = StepBatch(
            input_ids=self._tokens[0, :num_tokens],
            positions=self._tokens[1, :num_tokens],
            kv_slots=self._tokens[2, :num_tokens],
            query_start=self._query_start[: num_rows + 1],
            seq_lens=self._rows[0, :num_rows],
            row_slots=self._rows[1, :num_rows],
            logit_indices=self._rows[2, :num_rows],
            block_tables=self._block_tables,
            arrivals=self._arrivals[:num_rows],
            num_decode_rows=num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len_bound=max_seq_len_bound,
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
            batch.kv_slots,
            batch.query_start,
            batch.seq_lens,
            batch.row_slots,
            batch.logit_indices,
            self._block_size,
            max_query_len,
        )
        return batch
