"""The readback packet: what a step reports, packed on the device into one int32 tensor, unpacked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from headway.core.plan import Floats, Int32s, LogprobsResult, StepResult

Part = tuple[torch.Tensor, ...]
"""What a step reports beside its records, int32 or float32: log-probabilities, or vectors of rows and of tokens."""


def record_ints(width: int) -> int:
    """Ints of a row's record: outcomes, first token, finish code, known tokens after the step, ``width`` - 1 further tokens."""
    return 3 + width


@dataclass(slots=True)
class ResultLayout:
    """Where things are in a packet.

    Attributes:
        logprob_entries: K of the rows' log-probabilities; -1: none.
        width: outcomes that a row of the step can have.
        record_ints: of a row.
        prompt_rows: (row, positions) of rows that report prompt log-probabilities.
        prompt_entries: K of those.
        vector: numbers of each row's vector; 0 where the step does not pool, or rows have none.
        aligned: (row, tokens) of rows whose tokens are placed in a recording.
        token_vector, num_tokens, padded_tokens: numbers of each token's vector, 0 where nobody wants them; tokens.
    """

    num_rows: int
    padded_rows: int
    logprob_entries: int = -1
    width: int = 1
    record_ints: int = 4
    prompt_rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_entries: int = -1
    aligned: list[tuple[int, int]] = field(default_factory=list)
    vector: int = 0
    token_vector: int = 0
    num_tokens: int = 0
    padded_tokens: int = 0


def pack_results(records: torch.Tensor, record_ints: int, num_rows: int, parts: Sequence[Part]) -> torch.Tensor:
    """One contiguous int32 tensor of the first ``num_rows`` records (int32 [n * record_ints]) and of every part;
    floats as their bits."""
    rows = records[: num_rows * record_ints]
    if not parts:
        return rows
    flat = [rows]
    for part in parts:
        flat += [(each if each.dtype == torch.int32 else each.view(torch.int32)).reshape(-1) for each in part]
    return torch.cat(flat)


def logprob_ints(num_positions: int, entries: int) -> int:
    """Ints that the log-probabilities of ``num_positions`` take."""
    return num_positions * (2 * (1 + entries) + 2)


def unpack_results(packet: Int32s, layout: ResultLayout) -> StepResult:
    """The step's result; all arrays are copies, so the packet's buffer may be reused at once."""
    ints, num_rows = layout.record_ints, layout.num_rows
    end = layout.padded_rows * ints
    columns = packet[: num_rows * ints].reshape(num_rows, ints).T.copy()
    if layout.width == 1:
        result = StepResult(columns[0], columns[1, :, None], columns[2])
    else:
        result = StepResult(columns[0], columns[[1, *range(4, 3 + layout.width)]].T, columns[2])
    if layout.logprob_entries >= 0:
        parts = []
        for _ in range(layout.width):
            part, end = _logprobs(packet, end, layout.padded_rows, layout.logprob_entries)
            parts.append(_rows_of(part, 0, num_rows))
        result.logprobs = parts[0] if len(parts) == 1 else _interleaved(parts)
    if layout.vector:
        result.vectors = _vectors(packet, end, num_rows, layout.vector)
        end += layout.padded_rows * layout.vector
    if layout.token_vector:
        result.token_vectors = _vectors(packet, end, layout.num_tokens, layout.token_vector)
    if layout.prompt_rows:
        total = sum(count for _, count in layout.prompt_rows)
        part, end = _logprobs(packet, end, total, layout.prompt_entries)
        start = 0
        for row, count in layout.prompt_rows:
            result.prompt_logprobs[row] = _rows_of(part, start, start + count)
            start += count
    for row, count in layout.aligned:
        result.aligned[row] = packet[end : end + count].copy()
        end += count
    return result


def _vectors(packet: Int32s, start: int, count: int, width: int) -> Floats:
    return packet[start : start + count * width].copy().view(np.float32).reshape(count, width)


def _logprobs(packet: Int32s, start: int, num: int, entries: int) -> tuple[LogprobsResult, int]:
    width = 1 + entries
    sizes = np.cumsum([start, num * width, num * width, num, num])
    ids, values, ranks, counts = (packet[a:b].copy() for a, b in pairwise(sizes))
    part = LogprobsResult(
        token_ids=ids.reshape(num, width),
        logprobs=values.view(np.float32).reshape(num, width),
        ranks=ranks,
        counts=counts,
    )
    return part, int(sizes[-1])


def _interleaved(parts: list[LogprobsResult]) -> LogprobsResult:
    """Position i of part j at i * len(parts) + j."""

    def column(name: str) -> Any:
        whole = np.stack([getattr(part, name) for part in parts], 1)
        return whole.reshape(-1, *whole.shape[2:])

    return LogprobsResult(*(column(name) for name in ("token_ids", "logprobs", "ranks", "counts")))


def _rows_of(part: LogprobsResult, start: int, end: int) -> LogprobsResult:
    return LogprobsResult(
        token_ids=part.token_ids[start:end],
        logprobs=part.logprobs[start:end],
        ranks=part.ranks[start:end],
        counts=part.counts[start:end],
    )
