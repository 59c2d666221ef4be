"""What a runner asks of the ranks that run its steps with it."""

from __future__ import annotations

from typing import Final, Protocol

from headway.parallel.group import RankError

STEP: Final = 1
LEARN: Final = 2
STOP: Final = 3
"""Kinds of messages: a ``Launch`` in bytes, the vocabulary's words, the end."""


class Followers(Protocol):
    """The other ranks, as the leader sees them.

    Attributes:
        lost: which of them has gone, and how; None while all are there.
    """

    lost: str | None

    def send(self, kind: int, data: bytes) -> None:
        """Tell all of them. Does not wait for any."""

    def check(self) -> None:
        """Raises RankError when one of them has gone."""

    def explain(self, error: RankError) -> RankError:
        """``error`` of a step, or better what has become known of the rank at fault."""
