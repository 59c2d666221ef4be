"""``Seat``: which of several replicas an engine is, where these share the experts of a mixture."""

from __future__ import annotations

import msgspec


class Seat(msgspec.Struct, array_like=True, frozen=True):
    """One replica's place.

    Attributes:
        rank, size: which of how many.
        folder: of this host, of mode 0700, where the replicas leave word for each other.
    """

    rank: int
    size: int
    folder: str
