"""What speculative decoding did during a measurement: drafts, how many became tokens, the acceptance length."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headway.cli.http_client import HttpClient
from headway.cli.http_wire import TransportError

if TYPE_CHECKING:
    from headway.core.messages import EngineStats

PATIENCE_SECONDS: Final = 5.0
"""With a server that does not say what it drafted."""
_SAMPLE: Final = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^}]*\})? ([-+.eE\d]+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Since some start.

    Attributes:
        rows: of drafts that were verified.
        drafted, accepted: drafts, and those that became tokens.
    """

    rows: float
    drafted: float
    accepted: float

    def since(self, before: DraftCounts | None) -> DraftCounts:
        """What came after ``before``; None: from nothing."""
        if before is None:
            return self
        return DraftCounts(self.rows - before.rows, self.drafted - before.drafted, self.accepted - before.accepted)

    def figures(self) -> dict[str, Any]:
        """For JSON. The acceptance length is tokens a row with drafts, None if there was none."""
        return {
            "spec_decode_num_drafts": int(self.rows),
            "spec_decode_num_draft_tokens": int(self.drafted),
            "spec_decode_num_accepted_tokens": int(self.accepted),
            "spec_decode_acceptance_length": 1 + self.accepted / self.rows if self.rows else None,
        }


def counted(stats: EngineStats) -> DraftCounts | None:
    """An engine's; None where nothing is drafted."""
    if not stats.num_accepted_tokens_per_pos:
        return None
    return DraftCounts(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)


def published(text: str) -> DraftCounts | None:
    """A server's, of its /metrics in Prometheus' format, Headway's or vLLM's, all its engines added up; None: it has none."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return DraftCounts(found["drafts"], found["draft_tokens"], found["accepted_tokens"]) if len(found) == 3 else None


async def asked(client: HttpClient) -> DraftCounts | None:
    """What the server at the other end says now; None if it publishes no such figures."""
    question = client.collect(client.address.request("GET", "/metrics", client.headers))
    try:
        status, body = await asyncio.wait_for(question, PATIENCE_SECONDS)
    except (TransportError, TimeoutError):
        return None
    return published(body.decode("utf-8", "replace")) if status == 200 else None


def sentence(found: DraftCounts | None) -> str:
    """For people; empty without drafts."""
    if found is None:
        return ""
    length = f"{1 + found.accepted / found.rows:.2f}" if found.rows else "none: nothing was drafted"
    return f"Drafted: {found.drafted:.0f} tokens, accepted: {found.accepted:.0f}, acceptance length: {length}"
