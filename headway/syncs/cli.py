"""``headway syncs``: run a program, or all ranks of a launcher, and report where hosts wait for their GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from headway.syncs import ci, launchers, ranks
from headway.syncs.allowlist import AllowList
from headway.syncs.errors import AllowListError, ProbeError
from headway.syncs.findings import Finding
from headway.syncs.lint import check_paths
from headway.syncs.report import Run, show, write_html, write_json
from headway.syncs.session import DRIVERS, watch
from headway.syncs.target import UsageError, parse
from headway.syncs.target import run as run_target

FAILED: Final = 3
"""Exit status when --fail-on is reached: unlike a failure of the target or of the command line (2)."""


@dataclasses.dataclass
class Options:
    """What the command does beside running the target.

    Attributes:
        json_file, html_file, sarif_file: reports to write.
        fail_on: exit with FAILED at this many lines with waits not allowed.
        baseline: an earlier --json report.
        fail_on_new: exit with FAILED if a line waits that the baseline does not have.
        allow_file: places where waiting is right.
        write_allow: an allow list to write, of all that was found.
        github: print annotations for GitHub's workflows.
        lint: run nothing: read the target, files and folders, for idioms that wait.
        simulate, driver: how to watch.
    """

    json_file: Path | None = None
    html_file: Path | None = None
    sarif_file: Path | None = None
    fail_on: int | None = None
    baseline: Path | None = None
    fail_on_new: bool = False
    allow_file: Path | None = None
    write_allow: Path | None = None
    github: bool = False
    lint: bool = False
    simulate: bool = False
    driver: str = "auto"


HELP: Final = {
    "json_file": "write the findings and the timeline as JSON",
    "html_file": "write one self-contained page with a timeline",
    "sarif_file": "write SARIF 2.1.0, for code scanning",
    "fail_on": f"exit with status {FAILED} at N or more lines with waits not allowed",
    "baseline": "an earlier --json report; what is in it is not new",
    "fail_on_new": f"exit with status {FAILED} if a line waits that --baseline does not have",
    "allow_file": "TOML list of places where waiting is right, with reasons",
    "write_allow": "write an allow list of all that was found, to go through",
    "github": "print annotations for GitHub workflows (always done inside one)",
    "lint": "run nothing: read files and folders for idioms that may wait",
    "simulate": "pretend CUDA on a machine without it; no times",
    "driver": "how to watch the driver boundary",
}


def main(arguments: list[str] | None = None) -> int:
    """``python -m headway.syncs``."""
    parser = argparse.ArgumentParser(prog="headway syncs", description=__doc__)
    for field in dataclasses.fields(Options):
        flag = "--" + field.name.removesuffix("_file").replace("_", "-")
        more: dict[str, Any] = {"dest": field.name, "help": HELP[field.name]}
        if field.default is False:
            more["action"] = "store_true"
        elif field.name == "fail_on":
            more |= {"metavar": "N", "type": int}
        elif field.name == "driver":
            more |= {"choices": DRIVERS, "default": "auto"}
        else:
            more |= {"metavar": "FILE", "type": Path}
        parser.add_argument(flag, **more)
    parser.add_argument("target", nargs="+", metavar="-- python script.py", help="what to run")
    given = vars(parser.parse_args(arguments))
    return syncs(given.pop("target"), Options(**given))


def syncs(target: list[str], options: Options) -> int:
    """Run ``target`` in this process, watched; print the report to stderr; write the files asked for.

    Returns:
        The target's exit status; 2 if nothing could be run or watched, or silence proves nothing; FAILED if a limit was
        reached.
    """
    if options.lint:
        return _lint(target, options)
    try:
        allow = AllowList.load(options.allow_file) if options.allow_file else AllowList()
        baseline = ci.load_baseline(options.baseline) if options.baseline else None
        if options.fail_on_new and baseline is None:
            raise UsageError("--fail-on-new needs --baseline FILE, the --json report of a run that was right")
        if options.driver not in DRIVERS:
            raise UsageError(f"--driver {options.driver}: one of {', '.join(DRIVERS)}")
        run = _watched(target, options, allow)
    except (ProbeError, AllowListError, UsageError, ci.BaselineError) as error:
        sys.stderr.write(f"headway syncs: {error}\n")
        return 2
    if (folder := ranks.folder()) is not None:
        ranks.write(run, folder)
        return run.exit_status  # the launcher's parent judges: a status of ours would end the other ranks
    new = None if baseline is None else ci.new_findings(run, baseline)
    if new is not None:
        run.notes.append(f"{len(new)} of the findings are not in the baseline" + "".join(f"\n  {f.site}" for f in new))
    show(run)
    _write(run, options, new)
    limit = options.fail_on is not None and run.log.lines >= max(options.fail_on, 1)
    if limit or (options.fail_on_new and new):
        return FAILED
    return run.exit_status or (2 if run.unproven else 0)


def _watched(target: list[str], options: Options, allow: AllowList) -> Run:
    """The target's run, with a note for each allowance that covered nothing; all ranks of a launcher as one."""
    launch = launchers.find(target, options.simulate) if ranks.folder() is None else None
    if launch is None:
        parse(target)
        run = watch(lambda: _run(target), target, allow, simulate=options.simulate, driver=options.driver)
        run.notes += [f"allow list: {entry.file}:{entry.place} covered nothing" for entry in allow.unused]
        return run
    own = ["--driver", options.driver] + ["--simulate"] * options.simulate
    own += ["--allow", str(options.allow_file)] if options.allow_file else []
    return ranks.launch(launch, own, target)


def _lint(paths: list[str], options: Options) -> int:
    """Print what may wait, lines in loops first; FAILED if ``fail_on`` lines or more do."""
    hints, problems = check_paths([Path(path) for path in paths])
    for hint in hints:
        sys.stdout.write(f"{hint}\n")
    for problem in problems:
        sys.stderr.write(f"headway syncs --lint: {problem}\n")
    lines = len({(hint.file, hint.line) for hint in hints})
    sys.stdout.write(f"{lines} lines may wait for the GPU, if their tensors are there: a run without --lint knows\n")
    if problems:
        return 2
    return FAILED if options.fail_on is not None and lines >= max(options.fail_on, 1) else 0


def _write(run: Run, options: Options, new: list[Finding] | None) -> None:
    if options.json_file:
        write_json(run, options.json_file)
    if options.html_file:
        write_html(run, options.html_file)
    if options.sarif_file:
        options.sarif_file.write_text(json.dumps(ci.sarif(run), indent=1) + "\n", encoding="utf-8")
    if options.write_allow:
        options.write_allow.write_text(ci.allow_file(run), encoding="utf-8")
    if options.github or ci.in_github():
        sys.stdout.write(ci.github_annotations(run, new))


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
