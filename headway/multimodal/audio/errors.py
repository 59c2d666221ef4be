"""What can be wrong with a recording."""

from __future__ import annotations


class AudioError(ValueError):
    """The recording cannot be used; the message says what is wrong with it, and what would do."""
