"""What can go wrong: a wait where none may be, a probe that is blind, an unreadable allow list."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.syncs.findings import Wait


class SyncError(RuntimeError):
    """The host waited for the device inside ``forbid()``. Raised after the wait, at the user's line.

    Attributes:
        wait: what happened and where.
    """

    def __init__(self, message: str, wait: Wait) -> None:
        super().__init__(message)
        self.wait = wait


class ProbeError(RuntimeError):
    """A probe could not attach (no CUDA, CUPTI taken, hooks overridden) or cannot serve this program."""


class AllowListError(ValueError):
    """The allow list is malformed; the message names the entry."""
