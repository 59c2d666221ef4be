"""The figures of docs/proof.md that need a GPU, in one command of a few minutes.

    python bench/proof.py --json bench/reports/proof/h200.json [--html docs/syncs-generate.html] [--part NAME ...]

Every part runs in a process of its own with a time limit, since CUPTI takes one subscriber a process and a crash must not take
the others' figures along; the JSON is written anew after each, and keeps the parts of an earlier run that are not run again.
Then ``python bench/proof_pages.py`` makes the pages.
Exit status 1 if a part failed or a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = "headway/cli/bench/anchors/models/qwen3_06b"
TAIL = 1500
"""Characters kept of what a part printed."""
MIN_SECONDS = 5.0
"""Less than this is not worth beginning for."""
_PACKAGES = re.compile(r"/[\w./+-]*/(?:site|dist)-packages/")
MAX_PAGE_BYTES = 1_000_000
"""Of the report page that is committed."""


@dataclass
class Part:
    """One process.

    Attributes:
        command: after ``python``; "OUT" is the JSON file it writes, "PAGE" an HTML file.
        seconds: its time limit.
        verdict: what is wrong with its result; empty: nothing.
    """

    name: str
    command: list[str]
    seconds: int
    verdict: Callable[[dict[str, Any]], str] = field(default=lambda result: "")


def corpus_verdict(result: dict[str, Any]) -> str:
    """Every label confirmed, nothing missed by the modes that promise everything."""
    wrong = [f"wrong labels: {result['wrong_labels']}"] if result.get("wrong_labels") else []
    wrong += [] if result.get("results") else ["no detector ran"]
    for name, line in result.get("results", {}).items():
        if "failed" in line or line["errors"]:
            wrong.append(f"{name}: {line.get('failed') or line['errors']}")
        elif name in ("live", "both") and (line["missed"] or line["false_alarms"]):
            wrong.append(f"{name}: missed {line['missed']}, false alarms {line['false_alarms']}")
    return "; ".join(wrong)


def calls_verdict(result: dict[str, Any]) -> str:
    """No wait in a launch, one copy each way."""
    wrong = [] if result.get("features") else ["no feature was measured"]
    for feature, line in result.get("features", {}).items():
        if "error" in line:
            wrong.append(f"{feature}: {line['error']}")
            continue
        if line["launch_waits"] or line["rest_waits"]:
            wrong.append(f"{feature}: {line['launch_waits']} waits in launches, {line['rest_waits']} beside them")
        if (line["h2d_per_step"], line["d2h_per_step"]) != (1.0, 1.0):
            wrong.append(f"{feature}: {line['h2d_per_step']} copies up, {line['d2h_per_step']} down")
    return "; ".join(wrong)


def page_verdict(result: dict[str, Any]) -> str:
    """It found waits, and knows how busy the GPU was."""
    if not result.get("totals", {}).get("unsanctioned"):
        return "no wait was found in transformers' generate, which is known to wait"
    return "" if result.get("gpu") or result.get("mode") == "cupti" else "the GPU's rows are missing"


def parts() -> list[Part]:
    """All of them, the most wanted first."""
    corpus = ["-m", "tests.syncs.run_corpus", "--json", "OUT"]
    generate = ["--", "python", "bench/programs/generate.py"]
    syncs = ["-m", "headway.syncs", "--json", "OUT"]
    calls = ["bench/step_calls.py", "--model", MODEL, "--json", "OUT"]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    detectors = [
        Part(f"corpus-{name}", [*corpus, "--detector", name], 90, corpus_verdict)
        for name in ("cupti", "live", "both", "torch", "profiler")
    ]
    return [
        *detectors,
        Part("calls-graphs", calls, 150, calls_verdict),
        Part(
            "calls-eager", [*calls, "--eager", "--tokens", "20"], 90, calls_verdict
        ),  # 270 launches a step, each heard
        Part("generate", [*syncs, "--html", "PAGE", "--driver", "profiler", *generate], 60, page_verdict),
        Part("generate-cupti", [*syncs, "--driver", "cupti", *generate], 45, page_verdict),
        Part("tests", [*tests, "tests/syncs"], 90),
        Part("tests-engine", [*tests, "tests/gpu"], 120),
    ]


def run(part: Part, page: Path | None, seconds: float) -> dict[str, Any]:
    """Its result within ``seconds``, or what became of it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        out, made = Path(place) / "out.json", Path(place) / "page.html"
        words = [{"OUT": str(out), "PAGE": str(made)}.get(word, word) for word in part.command]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": paths},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            status, printed = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            status, printed = -1, f"took more than {seconds:.0f} s\n{_text(expired.stdout)}{_text(expired.stderr)}"
        result = json.loads(placeless(out.read_text())) if out.exists() else {}
        html = placeless(made.read_text()) if made.exists() else None
        size = None if html is None else len(html.encode())
        if (
            page is not None and html is not None and size is not None
        ):  # too large: kept, but not under the committed name
            (page if size <= MAX_PAGE_BYTES else page.with_suffix(".large.html")).write_text(html)
    result.pop("timeline", None)  # it is in the page
    wants_result = "OUT" in part.command
    wrong = part.verdict(result) if result else "no result" if wants_result else ""
    if not wrong and status not in ((0, 1) if wants_result else (0,)):  # a result says itself what is wrong
        wrong = f"exit status {status}"
    return {
        "seconds": round(time.monotonic() - start, 1),
        "status": status,
        "wrong": wrong,
        "page_bytes": size,
        "printed": placeless(printed)[-TAIL:],
        "result": result,
    }


def placeless(text: str) -> str:
    """``text`` without the folders in which this machine keeps packages and this checkout."""
    return _PACKAGES.sub("", text).replace(f"{ROOT}/", "")


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--html", type=Path, help="where the page on transformers' generate goes")
    parser.add_argument("--part", action="append", choices=[part.name for part in parts()], help="only these")
    parser.add_argument(
        "--seconds", type=float, default=360, help="for all parts; those that come too late are left out"
    )
    given = parser.parse_args()
    chosen = [part for part in parts() if not given.part or part.name in given.part]
    report: dict[str, Any] = {"python": platform.python_version(), "parts": {}}
    if given.json.exists():
        report["parts"] = json.loads(given.json.read_text())["parts"]
    end = time.monotonic() + given.seconds
    for part in chosen:
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            print(f"{part.name:16} no time left", flush=True)
            report["parts"][part.name] = {"wrong": "no time left", "result": {}}
            continue
        outcome = report["parts"][part.name] = run(part, given.html, min(part.seconds, left))
        given.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{part.name:16} {outcome['seconds']:6.1f} s  {outcome['wrong'] or 'ok'}", flush=True)
        if outcome["wrong"]:
            print("    " + outcome["printed"][-600:].replace("\n", "\n    "), flush=True)
    given.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(report["parts"][part.name]["wrong"] for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
