"""``StepBatch``: everything a forward pass may know about its step. Passed as an argument, never kept in a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepBatch:
    """One step on the device. T = padded tokens, R = padded rows, S = slots, MB = blocks per sequence.

    All tensors are int32 on the engine's device, but for ``arrivals`` filled by ``step_unpack``; the host never reads them.

    Attributes:
        input_ids: [T]; 0 on padding.
        positions: [T]; 0 on padding.
        kv_slots: [T], block * block_size + offset of each token's KV; -1 writes nothing (padding, zombie rows).
        query_start: [R + 1], first token of each row.
        seq_lens: [R], context length including this step's tokens; 0 on padding and zombie rows.
        row_slots: [R], batch row -> slot; -1 on padding.
        logit_indices: [R], batch row -> its last token.
        block_tables: [S, MB], slot -> KV blocks; 0 is the null block.
        arrivals: [R, KH], scratch of the attention kernels, zero between them.
        num_decode_rows: leading rows with exactly one token; with ``decode_rows`` a bound.
        max_query_len: >= every row's tokens; sizes grids only.
        max_seq_len_bound: >= every seq_len; sizes grids only.
        decode_rows: [1], their true number in a step with prompts, see ``paged_attention``; None: ``num_decode_rows``.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    row_slots: torch.Tensor
    logit_indices: torch.Tensor
    block_tables: torch.Tensor
    arrivals: torch.Tensor
    num_decode_rows: int
    max_query_len: int
    max_seq_len_bound: int
    decode_rows: torch.Tensor | None = None
