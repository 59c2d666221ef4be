"""What happened when: waits per host thread, work per stream, and the gaps in which the device had nothing to do."""

from __future__ import annotations

import itertools
from typing import Any, Final

from headway.syncs.findings import Wait

Spans = dict[str, list[tuple[float, float, str]]]
"""Row -> (start, duration, name), in microseconds."""

MAX_SPANS: Final = 20_000
"""Per row, for the page; beyond it only every n-th is drawn, and the page says how many are not. Sums are exact."""
MAX_NAME: Final = 80
"""Characters of a kernel's name on the page: templates write novels."""
MIN_GAP: Final = 1.0
"""Microseconds; shorter gaps are the device's own time between two kernels."""


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(start, end) pairs, joined where they touch or overlap, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def gaps(busy: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(start, duration) of the holes between merged busy intervals."""
    pairs = itertools.pairwise(busy)
    return [(before[1], after[0] - before[1]) for before, after in pairs if after[0] - before[1] >= MIN_GAP]


def build(waits: list[Wait], streams: Spans, start: float, wall: float) -> dict[str, Any]:
    """The timeline part of the data model; times are relative to ``start``. A stream's spans name their kernels by number."""
    threads: dict[str, list[dict[str, Any]]] = {}
    for wait in waits:
        if wait.start_ns:
            threads.setdefault(wait.thread, []).append(
                {
                    "start": round(wait.start_ns / 1000 - start, 1),
                    "dur": round(wait.micros or 0.0, 1),
                    "name": wait.call,
                    "kind": str(wait.kind),
                    "site": str(wait.site),
                    "sanctioned": wait.reason is not None,
                }
            )
    names: dict[str, int] = {}
    rows = {
        row: [
            [round(a - start, 1), round(d, 1), names.setdefault(n[:MAX_NAME], len(names))]
            for a, d, n in _thinned(spans)
        ]
        for row, spans in streams.items()
    }
    union = merged([(at, at + duration) for spans in streams.values() for at, duration, _ in spans])
    holes = gaps(union)
    every: list[tuple[str, list[Any]]] = [*sorted(threads.items()), *streams.items(), ("gaps", holes)]
    return {
        "wall": round(wall, 1),
        "threads": [{"name": name, "spans": _thinned(spans)} for name, spans in sorted(threads.items())],
        "streams": [{"name": row, "spans": spans} for row, spans in rows.items()],
        "names": list(names),
        "hidden": {row: len(spans) - len(_thinned(spans)) for row, spans in every if len(spans) > MAX_SPANS},
        "gaps": [[round(at - start, 1), round(duration, 1)] for at, duration in _thinned(holes)],
        "idle_micros": round(sum(duration for _, duration in holes), 1) if streams else None,
        "busy_micros": round(sum(end - at for at, end in union), 1) if streams else None,
    }


def _thinned(spans: list[Any]) -> list[Any]:
    step = -(-len(spans) // MAX_SPANS) or 1
    return spans[::step]
