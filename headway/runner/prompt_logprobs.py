"""Prompt log-probabilities: which positions of a step report some (host), and the entries themselves (device)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from headway.core.plan import Int32s, StepPlan
from headway.runner.launch import PromptPositions
from headway.sampling.logprobs import Logprobs, LogprobTensors
from headway.state.packed_step import PackedStep


def choose_positions(
    packed: PackedStep, plan: StepPlan, asked: Int32s, prompts: Sequence[Int32s]
) -> PromptPositions | None:
    """Write the lists for the rows whose prompt log-probabilities were asked for into the packed step; None without any.

    Args:
        asked: int32 [R], entries that each row asks for; -1: none.
        prompts: of each slot's request, int32.
    """
    if asked.max(initial=-1) < 0:
        return None
    starts = np.cumsum(plan.query_lens) - plan.query_lens
    rows: list[tuple[int, int]] = []
    indices: list[Int32s] = []
    targets: list[Int32s] = []
    for row in np.flatnonzero(asked >= 0):
        prompt = prompts[plan.slots[row]]
        first = int(plan.starts_bound[row])
        count = min(first + int(plan.query_lens[row]), len(prompt) - 1) - first
        if count > 0:
            rows.append((int(row), count))
            indices.append(np.arange(starts[row], starts[row] + count, dtype=np.int32))
            targets.append(prompt[first + 1 : first + 1 + count])
    if not rows:
        return None
    slots = np.repeat(plan.slots[[row for row, _ in rows]], [count for _, count in rows])
    return PromptPositions(
        rows=rows,
        indices_at=packed.list_at(np.concatenate(indices)),
        targets_at=packed.list_at(np.concatenate(targets)),
        slots_at=packed.list_at(slots.astype(np.int32)),
        entries=int(asked[[row for row, _ in rows]].max()),
    )


def gather_entries(
    packed: torch.Tensor,
    prompt: PromptPositions,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    logprobs: Logprobs,
    most: int,
) -> LogprobTensors:
    """Log-probabilities at the chosen positions.

    Args:
        packed: int32 [P], the packed step on the device, with the lists.
        hidden: [T, hidden] of all tokens.
        logits_of: [N, hidden] -> [N, V].
        most: positions whose logits exist at once.
    """

    def listed(position: int) -> torch.Tensor:
        return packed[position : position + prompt.total]

    indices, targets, slots = listed(prompt.indices_at), listed(prompt.targets_at), listed(prompt.slots_at)
    chunks = []
    for start in range(0, prompt.total, most):
        part = slice(start, start + most)
        logits = logits_of(hidden.index_select(0, indices[part]))
        chunks.append(logprobs.gather_prompt(logits, targets[part], slots[part], prompt.entries))
    ids, values, ranks, counts = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    return ids, values, ranks, counts
