"""Vector clocks: which accesses are ordered by streams, events and host waits, whatever the order they happened to run in.

Participants are the streams and "host". A participant's clock says how much of every other one is known to have finished
before whatever it does next (Fidge 1988, Mattern 1989).
"""

from __future__ import annotations

from typing import NamedTuple

from headway.device.sim.errors import Place

Clock = dict[str, int]

_MANY = 512


def merge(into: Clock, other: Clock) -> None:
    """Everything ``other`` knows is known to ``into`` from now on."""
    for name, count in other.items():
        if count > into.get(name, 0):
            into[name] = count


class Seen(NamedTuple):
    """An access that was made."""

    who: str
    seq: int
    place: Place
    is_write: bool


class AccessLog:
    """Accesses to one memory: per participant, the latest of every byte range and kind."""

    __slots__ = ("_by_participant",)

    def __init__(self) -> None:
        self._by_participant: dict[str, dict[tuple[int, int, bool], tuple[int, Place]]] = {}

    def conflict(self, who: str, clock: Clock, low: int, high: int, is_write: bool) -> Seen | None:
        """An earlier access to the same bytes by another participant that ``clock`` does not know to be over."""
        for other, entries in self._by_participant.items():
            if other == who:
                continue
            known = clock.get(other, 0)
            for (first, last, wrote), (seq, place) in entries.items():
                if seq > known and (wrote or is_write) and first < high and low < last:
                    return Seen(other, seq, place, wrote)
        return None

    def add(self, who: str, seq: int, place: Place, low: int, high: int, is_write: bool) -> None:
        """Record an access."""
        entries = self._by_participant.setdefault(who, {})
        key = (low, high, is_write)
        entries.pop(key, None)
        entries[key] = (seq, place)
        if len(entries) > _MANY:  # the oldest are long over
            for old in list(entries)[: _MANY // 2]:
                del entries[old]
