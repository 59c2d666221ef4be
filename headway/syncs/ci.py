"""For continuous integration: lines that wait and are not in a baseline, GitHub's annotations, SARIF, a first allow list."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headway.syncs.findings import Finding
from headway.syncs.fixes import FIXES, cure_of
from headway.syncs.places import short, source_line
from headway.syncs.report import Run, to_dict

Key = tuple[str, str, str, str, str]
"""What makes a finding the same in two versions of a program: file, function, kind, call and the text of the line."""


class BaselineError(ValueError):
    """The baseline cannot be read; the message names the file."""


def load_baseline(path: Path) -> set[Key]:
    """The findings of an earlier ``--json`` report, allowed ones too.

    Raises:
        BaselineError: no such file, or not a report.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["findings"]
        return {(f["file"], f["function"], f["kind"], f["call"], f.get("source", "")) for f in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"--baseline {path}: not a report of headway syncs --json ({error})") from error


def key_of(finding: Finding) -> Key:
    """A line that has only moved is the same."""
    site = finding.site
    return short(site.file), site.function, str(finding.kind), finding.call, source_line(site)


def new_findings(run: Run, baseline: set[Key]) -> list[Finding]:
    """Findings without a reason that the baseline does not have."""
    return [finding for finding in run.log.unsanctioned if key_of(finding) not in baseline]


def github_annotations(run: Run, new: list[Finding] | None = None) -> str:
    """GitHub's workflow commands: an error on each line that waits; a notice where it is in the baseline already."""
    lines = []
    for finding in run.log.unsanctioned:
        level = "error" if new is None or finding in new else "notice"
        fix = cure_of(finding)
        text = f"{finding.call} waits for the GPU ({finding.kind}, {finding.count}x). {fix.name}: {fix.advice}"
        if finding.via:
            text += f" Through {finding.via}."
        place = f"file={_property(short(finding.site.file))},line={max(finding.site.line, 1)}"
        lines.append(f"::{level} {place},title=host wait::{_message(text)}")
    lines += [f"::error title=headway syncs proves nothing::{_message(reason)}" for reason in run.unproven]
    return "".join(line + "\n" for line in lines)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def sarif(run: Run) -> dict[str, Any]:
    """SARIF 2.1.0 (OASIS), one rule per cure, one result per finding; allowed ones are suppressed with their reason."""
    data = to_dict(run)
    rules = [{"id": fix.name.replace(" ", "-"), "shortDescription": {"text": fix.advice}} for fix in FIXES]
    results = [_result(finding) for finding in data["findings"]]
    driver = {"name": "headway-syncs", "rules": rules}
    notices = [{"level": "error", "message": {"text": reason}} for reason in run.unproven]
    invocation = {"executionSuccessful": not run.unproven, "toolExecutionNotifications": notices}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "invocations": [invocation], "results": results}],
    }


def _result(finding: dict[str, Any]) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": finding["file"]}, "region": {"startLine": max(finding["line"], 1)}}
    made: dict[str, Any] = {
        "ruleId": finding["fix"]["name"].replace(" ", "-"),
        "level": "note" if finding["sanctioned"] else "warning",
        "message": {"text": f"{finding['call']} waits for the GPU ({finding['kind']}). {finding['fix']['advice']}"},
        "locations": [{"physicalLocation": place, "logicalLocations": [{"fullyQualifiedName": finding["function"]}]}],
        "partialFingerprints": {"line": f"{finding['function']}/{finding['call']}/{finding['source']}"},
        "occurrenceCount": finding["count"],
    }
    if finding["sanctioned"]:
        made["suppressions"] = [{"kind": "external", "justification": finding["reason"]}]
    return made


def allow_file(run: Run) -> str:
    """A TOML allow list of all findings without a reason, for people to go through: each wants a reason of its own."""
    parts = [
        "# Written by headway syncs --write-allow. Give each entry its reason, or remove the wait and the entry.\n"
    ]
    for finding in run.log.unsanctioned:
        at = f"{short(finding.site.file)}:{finding.site.function}"
        lines = [
            "[[allow]]",
            f"at = {json.dumps(at)}  # {source_line(finding.site)[:80]}",
            'reason = "found on the first run, not yet looked at"',
            f"kind = {json.dumps(str(finding.kind))}",
            f"call = {json.dumps(finding.call)}",
        ]
        entry = "\n".join(lines) + "\n"
        parts += [entry] if entry not in parts else []
    return "\n".join(parts)


def in_github() -> bool:
    """Whether this runs in a workflow of GitHub's."""
    return os.environ.get("GITHUB_ACTIONS") == "true"
