"""``headway syncs``: run a program and report where its host waits for its GPU."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Final

from headway.syncs.allowlist import AllowList
from headway.syncs.errors import AllowListError, ProbeError
from headway.syncs.report import show, write_html, write_json
from headway.syncs.session import DRIVERS, watch
from headway.syncs.target import UsageError, parse
from headway.syncs.target import run as run_target

FAILED: Final = 3
"""Exit status when --fail-on is reached: unlike a failure of the target or of the command line (2)."""


def main(arguments: list[str] | None = None) -> int:
    """``python -m headway.syncs``."""
    parser = argparse.ArgumentParser(prog="headway syncs", description=__doc__)
    parser.add_argument("--json", metavar="F", type=Path, help="write the findings and the timeline as JSON")
    parser.add_argument("--html", metavar="F", type=Path, help="write one self-contained page with a timeline")
    parser.add_argument(
        "--fail-on", metavar="N", type=int, help=f"exit with status {FAILED} at N or more waits not allowed"
    )
    parser.add_argument(
        "--allow", metavar="FILE", type=Path, help="TOML list of places where waiting is right, with reasons"
    )
    parser.add_argument("--simulate", action="store_true", help="pretend CUDA on a machine without it; no times")
    parser.add_argument("--driver", choices=DRIVERS, default="auto", help="how to watch the driver boundary")
    parser.add_argument("target", nargs="+", metavar="-- python script.py", help="what to run")
    given = parser.parse_args(arguments)
    return syncs(
        given.target, given.json, given.html, given.fail_on, given.allow, simulate=given.simulate, driver=given.driver
    )


def syncs(
    target: list[str],
    json_file: Path | None = None,
    html_file: Path | None = None,
    fail_on: int | None = None,
    allow_file: Path | None = None,
    *,
    simulate: bool = False,
    driver: str = "auto",
) -> int:
    """Run ``target`` in this process, watched; print the report to stderr; write the files asked for.

    Returns:
        The target's exit status; 2 if nothing could be run or watched; FAILED if ``fail_on`` waits were reached.
    """
    try:
        allow = AllowList.load(allow_file) if allow_file else AllowList()
        parse(target)
        if driver not in DRIVERS:
            raise UsageError(f"--driver {driver}: one of {', '.join(DRIVERS)}")
        run = watch(lambda: _run(target), target, allow, simulate=simulate, driver=driver)
    except (ProbeError, AllowListError, UsageError) as error:
        sys.stderr.write(f"headway syncs: {error}\n")
        return 2
    run.notes += [f"allow list: {entry.file}:{entry.place} covered nothing" for entry in allow.unused]
    show(run)
    if json_file:
        write_json(run, json_file)
    if html_file:
        write_html(run, html_file)
    if fail_on is not None and run.log.lines >= max(fail_on, 1):
        return FAILED
    return run.exit_status or (2 if run.unproven else 0)


def _run(target: list[str]) -> int:
    try:
        return run_target(target)
    except KeyboardInterrupt:
        return 130
    except ProbeError:
        raise
    except Exception:
        traceback.print_exc()  # the report comes all the same
        return 1
