"""Vectors as the outputs that users get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.api.pooling.requests import Floats
from headway.api.pooling.score import ScoreJob
from headway.core.messages import AddRequest
from headway.core.outputs import (
    AnyPoolingOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from headway.core.task import Task

KINDS: dict[Task, tuple[Any, Any]] = {
    Task.EMBED: (EmbeddingRequestOutput, EmbeddingOutput),
    Task.CLASSIFY: (ClassificationRequestOutput, ClassificationOutput),
}


def request_outputs(
    task: Task, arrays: Sequence[Floats], messages: Sequence[AddRequest], cached: Sequence[int], plain: bool
) -> list[AnyPoolingOutput]:
    """One output for each prompt; ``plain``: of no kind of its own."""
    outer, inner = KINDS.get(task, (PoolingRequestOutput, PoolingOutput))
    if plain:
        outer, inner = PoolingRequestOutput, PoolingOutput
    return [
        outer(str(number), inner(array), message.prompt_token_ids, had)
        for number, (array, message, had) in enumerate(zip(arrays, messages, cached, strict=True))
    ]


def scoring_outputs(
    job: ScoreJob, scores: Floats, messages: Sequence[AddRequest], cached: Sequence[int]
) -> list[ScoringRequestOutput]:
    """One output for each pair."""
    ids = [message.prompt_token_ids for message in messages]
    had = list(cached)
    if not job.is_paired:
        count, pairs = len(job.first), len(job.second)
        one = ids[:count] if count == pairs else ids[:1] * pairs
        ids = [first + second for first, second in zip(one, ids[count:], strict=True)]
        had = [0] * pairs
    numbered = enumerate(zip(scores.tolist(), ids, had, strict=True))
    return [
        ScoringRequestOutput(str(i), ScoringOutput(score), tokens, number) for i, (score, tokens, number) in numbered
    ]
