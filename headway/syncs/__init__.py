"""Find the places where a PyTorch program's host waits for its GPU.

    from headway import syncs

    with syncs.record() as log:      # collect
        step()
    print(log.text())

    with syncs.forbid():             # raise SyncError at the first wait
        step()

    with syncs.allowed("the readback at the end of a step"):
        ids = out.tolist()           # a wait with a reason: counted, not an offence

Regions belong to the thread that entered them: a guard on one thread neither trips nor disarms another. A region whose
probe cannot attach raises ProbeError; it never reports zero unwatched. ``headway syncs -- python script.py`` does the same
to a whole program, `docs/syncs.md` has the table of findings and their cures.
"""

from __future__ import annotations

from headway.syncs.errors import AllowListError, ProbeError, SyncError
from headway.syncs.findings import Finding, Kind, Log, Wait
from headway.syncs.fixes import FIXES, Fix
from headway.syncs.places import Site
from headway.syncs.regions import allowed, forbid, record
from headway.syncs.steps import step

__all__ = [
    "FIXES",
    "AllowListError",
    "Finding",
    "Fix",
    "Kind",
    "Log",
    "ProbeError",
    "Site",
    "SyncError",
    "Wait",
    "allowed",
    "forbid",
    "record",
    "step",
]
