"""Run the corpus of waiting and innocent snippets under each detector and count what each sees.

    python -m tests.syncs.run_corpus [--json F] [--only NAME] [--detector live ...]

On CUDA: live, headway's guard alone; cupti, the driver boundary alone (cupti-python's callbacks), on this thread and on those
of autograd, which is also the ground truth the labels are checked against; both, the guard and the driver boundary, as
`headway syncs --driver cupti` runs them; profiler, the driver boundary from torch.profiler's records; torch,
set_sync_debug_mode alone. Anywhere without a GPU: simulation. F is written anew after each detector, so that one that breaks
loses nothing of the others. Exit status 1 if a label disagrees with the driver boundary, a detector could not run, or headway's
own detectors miss something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headway import syncs
from headway.syncs.cupti_probe import CuptiProbe
from headway.syncs.errors import ProbeError
from headway.syncs.findings import Wait
from headway.syncs.live import MESSAGE, LiveProbe
from headway.syncs.profiler_probe import ProfilerRun
from headway.syncs.regions import PROCESS
from headway.syncs.runtime import CudaRuntime
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


Detector = Callable[[], contextlib.AbstractContextManager[list[str]]]
"""Gives the kinds of waits that happen while its context is open."""


@contextlib.contextmanager
def probes_log(*probes: Any) -> Iterator[list[str]]:
    """Kinds seen by headway's probes."""
    kinds: list[str] = []
    with syncs.record(probes=probes or None) as log:
        yield kinds
    kinds.extend(str(finding.kind) for finding in log.findings)


AUTOGRADS_THREADS = "pt_autograd_"
"""How the system's names of the threads begin that torch makes for backward passes, one for each device."""


def on_autograds_thread() -> bool:
    """Whether this thread runs a backward pass for another one, which waits in ``backward()`` until it is done."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    return name.exists() and name.read_text().startswith(AUTOGRADS_THREADS)


@contextlib.contextmanager
def driver_log() -> Iterator[list[str]]:
    """Kinds seen at the driver boundary on this thread and on autograd's.

    Other threads are no part of the snippet's work: those that pin memory, those of the test runner, those of NCCL.
    """
    kinds: list[str] = []
    launching = threading.get_ident()

    def hear(wait: Wait) -> None:
        if threading.get_ident() == launching or on_autograds_thread():
            kinds.append(str(wait.kind))

    PROCESS.watch(hear)
    try:
        yield kinds
    finally:
        PROCESS.unwatch(hear)


def prove_that_autograd_is_heard(detector: Detector, device: str) -> None:
    """Wait on purpose in a backward pass.

    Raises:
        ProbeError: the detector did not hear it, so silence about backward passes would mean nothing.
    """
    x = torch.ones(1, device=device, requires_grad=True)
    x.register_hook(lambda gradient: gradient.mul(gradient.item()))
    with detector() as kinds:
        (x * 2).sum().backward()
    if not kinds:
        raise ProbeError("a deliberate wait in a backward pass was not heard: are autograd's threads called otherwise?")


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
    with ProfilerRun() as run:
        yield kinds
    trace = run.require_proof()
    kinds.extend(str(wait.kind) for wait in trace.waits + trace.outside)


Made = contextlib.AbstractContextManager[Detector]
"""A detector that stays attached while the context is open: CUPTI is not to be subscribed to a hundred times."""


def detectors() -> dict[str, Callable[[], Made]]:
    """Those that this kind of machine has; one that cannot attach raises ProbeError when it is entered."""
    if not torch.cuda.is_available():
        return {"simulation": lambda: attached(SimulationProbe())}
    return {
        "live": lambda: attached(LiveProbe(CudaRuntime())),
        "torch": lambda: contextlib.nullcontext(torch_mode),
        "cupti": driver_boundary,
        "both": lambda: attached(LiveProbe(CudaRuntime()), CuptiProbe()),
        "profiler": lambda: contextlib.nullcontext(profiler),
    }


@contextlib.contextmanager
def attached(*probes: Any) -> Iterator[Detector]:
    """headway's probes."""
    with syncs.record(probes=probes):
        yield lambda: probes_log(*probes)


@contextlib.contextmanager
def driver_boundary(device: str = "cuda") -> Iterator[Detector]:
    """CUPTI alone; proves first that it hears autograd's threads.

    Raises:
        ProbeError: it cannot attach, or does not hear them.
    """
    with syncs.record(probes=(CuptiProbe(),)):
        prove_that_autograd_is_heard(driver_log, device)
        yield driver_log


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


def run(snippets: list[Snippet], make: Callable[[], Made]) -> dict[str, Any]:
    """All snippets under one detector. A detector or snippet that breaks is reported, not raised."""
    seen: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    try:
        with make() as detector:
            for snippet in snippets:
                try:
                    seen[snippet.name] = judge(snippet, detector)
                except Exception as error:
                    errors[snippet.name] = f"{type(error).__name__}: {error}"[:300]
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    whole = [snippet for snippet in snippets if snippet.name in seen]
    return score(whole, seen) | {"seen": seen, "errors": errors, "snippets": len(whole)}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", help="names of snippets")
    parser.add_argument("--detector", action="append")
    given = parser.parse_args()
    unknown = {*(given.only or ())} - {s.name for s in corpus()} | {*(given.detector or ())} - {*detectors()}
    if unknown:
        parser.error(f"not known on this machine: {', '.join(sorted(unknown))}; detectors: {', '.join(detectors())}")
    snippets = [s for s in corpus() if not given.only or s.name in given.only]
    results: dict[str, Any] = {}
    wrong: list[str] = []
    for name, make in detectors().items():
        if given.detector and name not in given.detector:
            continue
        results[name] = run(snippets, make)
        show(name, results[name])
        wrong = label_errors(snippets, results)
        if given.json:
            given.json.write_text(
                json.dumps(about(snippets) | {"results": results, "wrong_labels": wrong}, indent=1) + "\n"
            )
    if wrong:
        print(f"labels the driver boundary contradicts: {', '.join(wrong)}")
    own = [results[name] for name in ("live", "both", "simulation") if name in results]
    broken = any("failed" in line or line["errors"] for line in results.values())
    return int(bool(wrong) or broken or any(line["missed"] or line["false_alarms"] for line in own))


def about(snippets: list[Snippet]) -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    try:
        cupti = metadata.version("cupti-python")
    except metadata.PackageNotFoundError:
        cupti = "none"
    return {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cupti_python": cupti,
        "labels": {snippet.name: snippet.kind for snippet in snippets},
    }


def show(name: str, line: dict[str, Any]) -> None:
    """One detector's figures."""
    if "failed" in line:
        print(f"{name:>10}: could not run: {line['failed']}", flush=True)
        return
    print(
        f"{name:>10}: {line['snippets']} snippets, precision {line['precision']}, recall {line['recall']}", flush=True
    )
    for key in ("missed", "false_alarms") if name != "torch" else ("missed",):
        print(f"            {key}: {', '.join(line[key]) or '-'}")
    if line["errors"]:
        print(f"            errors: {line['errors']}")


def label_errors(snippets: list[Snippet], results: dict[str, Any]) -> list[str]:
    """Snippets whose label and driver boundary disagree."""
    truth = next((results[name]["seen"] for name in ("cupti", "profiler") if "seen" in results.get(name, {})), None)
    if truth is None:
        return []
    known = [snippet for snippet in snippets if snippet.kind not in MUTE_AT_THE_DRIVER and snippet.name in truth]
    return [snippet.name for snippet in known if snippet.waits != bool(truth[snippet.name])]


if __name__ == "__main__":
    sys.exit(main())
