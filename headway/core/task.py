"""What a request wants of a model."""

from __future__ import annotations

from enum import StrEnum


class Task(StrEnum):
    """What a request wants. An engine serves ``GENERATE`` or some of the others, which all pool: they take vectors from the
    hidden states of the prompt and generate nothing. Names are vLLM's.
    """

    GENERATE = "generate"
    EMBED = "embed"
    """One vector for the whole text."""
    CLASSIFY = "classify"
    """Scores of a classifier's labels."""
    SCORE = "score"
    """How well two texts fit together: one number."""
    TOKEN_EMBED = "token_embed"
    """A vector for each token."""
    TOKEN_CLASSIFY = "token_classify"
    """Scores of labels for each token."""

    @property
    def pools(self) -> bool:
        """Whether nothing is generated."""
        return self is not Task.GENERATE

    @property
    def by_token(self) -> bool:
        """Whether each token has an outcome of its own."""
        return self in (Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)
