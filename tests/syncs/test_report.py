"""Sums of a report: of waits that were timed, or not, or of none."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from headway.syncs import report
from headway.syncs.findings import Log


class Told:
    """A finding that a report reads."""

    def __init__(self, timed: int, reason: str | None) -> None:
        self.count, self.timed, self.micros = 3, timed, 2.5 * timed
        self.reason, self.sanctioned = reason, reason is not None


@pytest.mark.parametrize("reason", [None, "allowed"])
def test_time_lost_is_that_of_waits_that_were_timed(reason: str | None) -> None:
    """None only where there were waits and not one was timed."""
    for number in range(4):
        for timed in product((0, 1, 3), repeat=number):
            findings: Any = [Told(each, reason) for each in timed]
            wanted = None if findings and not sum(timed) else 2.5 * sum(timed)
            assert report._lost(findings) == wanted, timed


@pytest.mark.parametrize(("busy", "unread"), [(0.0, 0), (40.0, 0), (40.0, 7)])
def test_a_devices_share_is_told_only_where_all_was_kept(busy: float, unread: int) -> None:
    run = report.Run(["x"], "live", Log(["p"]), 100.0, {"main": [(0.0, busy, "kernel")]} if busy else {}, unread=unread)
    found = report.to_dict(run)
    if unread or not busy:
        assert found["gpu"] is None or not found["gpu"]["busy_micros"]
    if unread:
        assert found["gpu"] is None and any("7 more pieces of GPU work" in note for note in found["notes"])
    elif busy:
        assert found["gpu"] == {"busy_micros": 40.0, "busy_percent": 40.0}
    assert found["totals"] == {
        "unsanctioned": 0, "lines": 0, "sanctioned": 0, "micros_lost": 0.0, "micros_sanctioned": 0.0
    }  # fmt: skip
