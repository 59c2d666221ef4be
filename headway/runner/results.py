"""The readback packet: what a step reports, packed on the device into one int32 tensor, unpacked on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from headway.core.plan import Int32s, LogprobsResult, StepResult
from headway.sampling.logprobs import LogprobTensors

RESULT_INTS = 4
"""Per row: sampled (0/1), token, finish code, known tokens after the step."""


@dataclass(slots=True)
class ResultLayout:
    """Where things are in a packet.

    Attributes:
        logprob_entries: K of the rows' log-probabilities; -1: none.
        prompt_rows: (row, positions) of rows that report prompt log-probabilities.
        prompt_entries: K of those.
    """

    num_rows: int
    padded_rows: int
    logprob_entries: int = -1
    prompt_rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_entries: int = -1


def pack_results(records: torch.Tensor, num_rows: int, parts: list[LogprobTensors]) -> torch.Tensor:
    """One contiguous int32 tensor of the first ``num_rows`` records (int32 [n * 4]) and of every log-probability part."""
    rows = records[: num_rows * RESULT_INTS]
    if not parts:
        return rows
    flat = [rows]
    for ids, logprobs, ranks, counts in parts:
        flat += [ids.reshape(-1), logprobs.view(torch.int32).reshape(-1), ranks, counts]
    return torch.cat(flat)


def logprob_ints(num_positions: int, entries: int) -> int:
    """Ints that the log-probabilities of ``num_positions`` take."""
    return num_positions * (2 * (1 + entries) + 2)


def unpack_results(packet: Int32s, layout: ResultLayout) -> StepResult:
    """The step's result; all arrays are copies, so the packet's buffer may be reused at once."""
    end = layout.padded_rows * RESULT_INTS
    rows = packet[: layout.num_rows * RESULT_INTS].reshape(layout.num_rows, RESULT_INTS)
    columns = rows.T.copy()
    result = StepResult(columns[0] != 0, columns[1], columns[2])
    if layout.logprob_entries >= 0:
        part, end = _logprobs(packet, end, layout.padded_rows, layout.logprob_entries)
        result.logprobs = _rows_of(part, 0, layout.num_rows)
    if layout.prompt_rows:
        total = sum(count for _, count in layout.prompt_rows)
        part, end = _logprobs(packet, end, total, layout.prompt_entries)
        start = 0
        for row, count in layout.prompt_rows:
            result.prompt_logprobs[row] = _rows_of(part, start, start + count)
            start += count
    return result


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


def _rows_of(part: LogprobsResult, start: int, end: int) -> LogprobsResult:
    return LogprobsResult(
        token_ids=part.token_ids[start:end],
        logprobs=part.logprobs[start:end],
        ranks=part.ranks[start:end],
        counts=part.counts[start:end],
    )
