"""What a model's vectors are, in plain data: how they are pooled, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from headway.core.task import Task

METHODS: Final = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt", "all", "step")
"""How a text's vector is made of its tokens': the first or last one, the mean, the greatest of each number, the mean weighted
by 1, 2, 3, ..., the sum over sqrt(number of tokens). "all" and "step": tokens keep their vectors, and texts have none."""

Kind = Literal["embed", "sparse", "classify", "token_classify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """What a model that pools gives.

    Attributes:
        kind: vectors of texts, weights of the vocabulary's entries, scores of texts, or scores of tokens.
        methods: of ``METHODS``; the results of several lie one behind the other.
        normalize: vectors get length 1.
        activation: of scores, and of what a head gives: "none", "sigmoid", "softmax", "relu".
        labels: names of the scores.
        token_parts: tasks by token that have heads of their own, and how many numbers these give; what they give lies one
            behind the other in a token's vector.
        head_first: the head runs on the tokens' hidden states, and what it gives is pooled (SPLADE).
    """

    kind: Kind
    methods: tuple[str, ...] = ("last",)
    normalize: bool = False
    activation: str = "none"
    labels: tuple[str, ...] = ()
    head_first: bool = False
    token_parts: tuple[tuple[Task, int], ...] = ()

    @property
    def by_token(self) -> bool:
        """Whether tokens have vectors and texts have none."""
        return self.kind == "token_classify" or "all" in self.methods or "step" in self.methods

    def token_columns(self) -> dict[Task, tuple[int, int]]:
        """Where the numbers of each of ``token_parts`` lie, [start, end)."""
        ends = list(accumulate(size for _, size in self.token_parts))
        return {task: (end - size, end) for (task, size), end in zip(self.token_parts, ends, strict=True)}

    def tasks(self) -> tuple[Task, ...]:
        """What requests may want."""
        if self.token_parts:
            return (Task.EMBED, *(task for task, _ in self.token_parts))
        if self.kind == "token_classify":
            return (Task.TOKEN_CLASSIFY,)
        if self.by_token:
            return (Task.TOKEN_EMBED,)
        if self.kind == "classify":
            return (Task.CLASSIFY, Task.SCORE) if len(self.labels) == 1 else (Task.CLASSIFY,)
        keeps_tokens = self.kind == "embed" and len(self.methods) == 1 and self.methods != ("last",)
        return (Task.EMBED, Task.TOKEN_EMBED) if keeps_tokens else (Task.EMBED,)
