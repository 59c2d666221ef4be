"""The groups of architectures that a walk visits, and how each is walked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.models.walk import decoders, others, poolers
from tests.models.walk.verdict import Verdict

GROUPS: Final = ("decoders", "mixtures", "latents", "hybrids", "poolers", "encoder-decoders", "sighted")
_WALKS: Final[dict[str, Callable[[str, int], Verdict]]] = {
    "poolers": poolers.walk, "encoder-decoders": others.walk_reader, "sighted": others.walk_sighted,
}  # fmt: skip


def members(group: str) -> list[str]:
    return poolers.architectures() if group == "poolers" else decoders.architectures(group)


def walk(group: str, architecture: str, seed: int) -> Verdict:
    """One draw of an architecture: the same for the same seed."""
    return _WALKS.get(group, decoders.walk)(architecture, seed)
