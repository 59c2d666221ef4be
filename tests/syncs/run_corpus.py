"""Run the corpus of waiting and innocent snippets under each detector and count what each sees.

    python -m tests.syncs.run_corpus [--json F] [--only NAME] [--detector live ...]

On CUDA: (a) live, headway's guard; (b) cupti, the driver boundary alone (cupti-python, else torch.profiler's records), which
is also the ground truth the labels are checked against; (c) torch, set_sync_debug_mode alone. Anywhere without a GPU:
(d) simulation. Exit status 1 if a label disagrees with the driver boundary, or headway's own detectors miss something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headway import syncs
from headway.syncs.cupti_probe import CuptiProbe
from headway.syncs.live import MESSAGE
from headway.syncs.profiler_probe import ProfilerRun
from headway.syncs.simulate import SimulationProbe

CORPUS = Path(__file__).parent / "corpus"
MUTE_AT_THE_DRIVER = {"query"}
"""Kinds that never block in the driver: a loop of queries returns at once each time."""


@dataclasses.dataclass(frozen=True)
class Snippet:
    """One file: its name, whether it waits, of which kind."""

    path: Path
    waits: bool
    kind: str

    @property
    def name(self) -> str:
        return self.path.stem


def load(path: Path) -> Snippet:
    """Read the label in the first line."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    found = re.fullmatch(r"# expected: (?:(none)|waits, kind=(\w+))", first)
    if found is None:
        raise ValueError(f"{path}: no label but {first!r}")
    return Snippet(path, found[1] is None, found[2] or "none")


def corpus() -> list[Snippet]:
    """All snippets, by name."""
    return [load(path) for path in sorted(CORPUS.glob("*.py"))]


@contextlib.contextmanager
def probes_log(*probes: Any) -> Iterator[list[str]]:
    """Kinds seen by headway's probes."""
    kinds: list[str] = []
    with syncs.record(probes=probes or None) as log:
        yield kinds
    kinds.extend(str(finding.kind) for finding in log.findings)


@contextlib.contextmanager
def torch_mode() -> Iterator[list[str]]:
    """torch's own mode, by itself."""
    kinds: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield kinds
        finally:
            torch.cuda.set_sync_debug_mode("default")
    kinds.extend("warning" for warning in caught if MESSAGE in str(warning.message))


@contextlib.contextmanager
def profiler() -> Iterator[list[str]]:
    """torch.profiler's CUPTI records."""
    kinds: list[str] = []
    with ProfilerRun(with_stack=False) as run:
        yield kinds
    kinds.extend(str(wait.kind) for wait in run.require_proof().waits)


Detector = Callable[[], contextlib.AbstractContextManager[list[str]]]


def detectors() -> dict[str, Detector]:
    """Those this machine can run."""
    if not torch.cuda.is_available():
        simulation = SimulationProbe()
        return {"simulation": lambda: probes_log(simulation)}
    found: dict[str, Detector] = {"live": probes_log, "torch": torch_mode}
    cupti = CuptiProbe()
    try:
        with syncs.record(probes=(cupti,)):
            pass
        found["cupti"] = lambda: probes_log(cupti)
    except syncs.ProbeError as error:
        print(f"cupti-python: {error}; torch.profiler's records instead", file=sys.stderr)
        found["cupti"] = profiler
    return found


def judge(snippet: Snippet, detector: Detector) -> list[str]:
    """The kinds that ``detector`` sees in one step after a warm one."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(syncs.record(probes=(SimulationProbe(),)))  # make() needs the pretence too
        parts = runpy.run_path(str(snippet.path))
        state = parts["make"]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts["step"](*state)
        torch.cuda.synchronize()
        with detector() as kinds:
            parts["step"](*state)
        return kinds


def score(snippets: list[Snippet], seen: dict[str, list[str]]) -> dict[str, Any]:
    """Precision and recall of one detector, and the snippets it gets wrong."""
    missed = [s.name for s in snippets if s.waits and not seen[s.name]]
    false = [s.name for s in snippets if not s.waits and seen[s.name]]
    hits = sum(s.waits and bool(seen[s.name]) for s in snippets)
    other = [f"{s.name}: {seen[s.name]}, not {s.kind}" for s in snippets if seen[s.name] and s.kind not in seen[s.name]]
    return {
        "precision": round(hits / (hits + len(false)), 3) if hits + len(false) else None,
        "recall": round(hits / (hits + len(missed)), 3) if hits + len(missed) else None,
        "missed": missed,
        "false_alarms": false,
        "other_kind": other,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", help="names of snippets")
    parser.add_argument("--detector", action="append")
    given = parser.parse_args()
    snippets = [s for s in corpus() if not given.only or s.name in given.only]
    results: dict[str, Any] = {}
    for name, detector in detectors().items():
        if given.detector and name not in given.detector:
            continue
        seen = {snippet.name: judge(snippet, detector) for snippet in snippets}
        results[name] = score(snippets, seen) | {"seen": seen}
        line = results[name]
        print(f"{name:>10}: {len(snippets)} snippets, precision {line['precision']}, recall {line['recall']}")
        for key in ("missed", "false_alarms") if name != "torch" else ("missed",):
            print(f"            {key}: {', '.join(line[key]) or '-'}")
    wrong = label_errors(snippets, results)
    if wrong:
        print(f"labels the driver boundary contradicts: {', '.join(wrong)}")
    if given.json:
        given.json.write_text(
            json.dumps({"torch": torch.__version__, "results": results, "wrong_labels": wrong}, indent=1)
        )
    own = [results[name] for name in ("live", "simulation") if name in results]
    return int(bool(wrong) or any(line["missed"] or line["false_alarms"] for line in own))


def label_errors(snippets: list[Snippet], results: dict[str, Any]) -> list[str]:
    """Snippets whose label and driver boundary disagree."""
    if "cupti" not in results:
        return []
    seen = results["cupti"]["seen"]
    return [s.name for s in snippets if s.kind not in MUTE_AT_THE_DRIVER and s.waits != bool(seen[s.name])]


if __name__ == "__main__":
    sys.exit(main())
