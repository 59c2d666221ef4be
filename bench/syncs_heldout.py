"""The held-out snippets (tests/syncs/heldout): label them on a card by CUPTI, and measure detectors against the labels.

    python -m bench.syncs_heldout --label            # on a card, about a minute: writes tests/syncs/heldout/labels.json
    python -m bench.syncs_heldout [--json OUT.json]  # precision and recall: the live ones on a card, else the simulation
    python -m bench.syncs_heldout --merge CARD.json CPU.json --json bench/reports/proof/heldout.json   # for the page
    ... --folder documented                          # the same for tests/syncs/documented, whose docstrings are labels by hand

A label is what CUPTI saw in the watched part of a snippet's second run, on its thread and on those that autograd runs its
backward passes on: the kinds of blocking calls, none for no wait. A call of CUDA's that the simulation counts and CUPTI cannot
see (loops around query) is in none of the snippets.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headway import syncs
from headway.syncs.simulate import SimulationProbe
from tests.syncs.run_corpus import Detector, detectors

FOLDER = Path(__file__).parents[1] / "tests" / "syncs" / "heldout"
DOCUMENTED = FOLDER.parent / "documented"
Snippet = Callable[[str], Iterator[None]]


def snippets(folder: Path = FOLDER) -> dict[str, Snippet]:
    """Name -> function, of all files: generators that take the device."""
    found: dict[str, Snippet] = {}
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"{folder.name}_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and inspect.isgeneratorfunction(value):
                assert name not in found, f"two snippets are called {name}"
                found[name] = value
    return found


def labels_of(folder: Path = FOLDER) -> tuple[dict[str, list[str]], str]:
    """Snippet -> what blocks in it, and who says so: CUPTI, or the first word of the docstrings, or nobody yet."""
    file = folder / "labels.json"
    if file.exists():
        return json.loads(file.read_text())["labels"], "CUPTI"
    by_hand = {name: (snippet.__doc__ or "").partition(":")[0] for name, snippet in snippets(folder).items()}
    if set(by_hand.values()) <= {"Waits", "Runs on"}:
        return {name: ["waits"] if word == "Waits" else [] for name, word in by_hand.items()}, "hand"
    return {}, "nobody yet"


def watch(snippet: Snippet, detector: Detector) -> list[str]:
    """The kinds that ``detector`` sees in the watched part of the second run; the first has loaded kernels and handles."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(syncs.record(probes=(SimulationProbe(),)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for _ in snippet("cuda"):
            pass
        parts = snippet("cuda")
        next(parts)
        torch.cuda.synchronize()
        with detector() as kinds:
            next(parts, None)
    return sorted(set(kinds))


def measure(names: list[str], folder: Path = FOLDER) -> dict[str, Any]:
    """Detector -> {"seen": snippet -> kinds, "errors": snippet -> what it died of}, or {"failed": why it cannot run here}."""
    known, results = snippets(folder), dict[str, Any]()
    for name in names:
        seen: dict[str, list[str]] = {}
        errors: dict[str, str] = {}
        try:
            with detectors()[name]() as detector:
                for key, snippet in known.items():
                    try:
                        seen[key] = watch(snippet, detector)
                    except Exception as error:
                        errors[key] = f"{type(error).__name__}: {error}"[:300]
            results[name] = {"seen": seen, "errors": errors}
        except Exception as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
    return results


def score(seen: dict[str, list[str]], labels: dict[str, list[str]]) -> dict[str, Any]:
    """Precision and recall over the snippets that have a label; one that died has seen nothing."""
    hits = [name for name, kinds in labels.items() if kinds and seen.get(name)]
    missed = [name for name, kinds in labels.items() if kinds and not seen.get(name)]
    alarms = [name for name, kinds in labels.items() if not kinds and seen.get(name)]
    return {
        "snippets": len(labels),
        "precision": round(len(hits) / (len(hits) + len(alarms)), 3) if hits or alarms else None,
        "recall": round(len(hits) / (len(hits) + len(missed)), 3) if hits or missed else None,
        "missed": missed,
        "false_alarms": alarms,
    }


def merge(files: list[Path], folder: Path) -> dict[str, Any]:
    """What the page shows of several runs' reports: each detector's score, and where the runs and the labels were made."""
    found: dict[str, Any] = {"labels": len(labels_of(folder)[0]), "results": {}}
    found["gpu"] = json.loads((folder / "labels.json").read_text())["card"]
    for file in files:
        report = json.loads(file.read_text())
        for name, line in report.items():
            if isinstance(line, dict) and "seen" in line:
                shown = ("snippets", "precision", "recall", "missed", "false_alarms")
                found["results"][name] = {key: line[key] for key in shown}
                found["simulation_torch" if name == "simulation" else "torch"] = report["torch_version"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", action="store_true", help="write the labels; needs a card and cupti-python")
    parser.add_argument("--folder", choices=(FOLDER.name, DOCUMENTED.name), default=FOLDER.name)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", help="reports of --json to make one of")
    options = parser.parse_args()
    folder = FOLDER.parent / options.folder
    if options.merge:
        options.json.write_text(json.dumps(merge(options.merge, folder), indent=1) + "\n")
        return 0
    labels, by = labels_of(folder)
    if options.label:
        found = measure(["cupti"] if torch.cuda.is_available() else ["simulation"], folder)
        if "cupti" not in found or "failed" in found["cupti"]:
            parser.error(f"labels come from CUPTI on a card alone: {found.get('cupti', 'no CUDA device')}")
        about, seen = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}, found["cupti"]["seen"]
        (folder / "labels.json").write_text(
            json.dumps({**about, "errors": found["cupti"]["errors"], "labels": seen}, indent=1) + "\n"
        )
        print(f"labels.json: {len(seen)} labels, {len(found['cupti']['errors'])} snippets died")
        if by == "hand":
            other = {name: kinds for name, kinds in seen.items() if bool(kinds) != bool(labels[name])}
            print(f"{len(other)} labels by hand were wrong: {other}")
        return int(bool(found["cupti"]["errors"]))
    results: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for (
        name
    ) in detectors():  # a process each: what one has left in the driver's tools is none of the next one's business
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            results |= pool.submit(measure, [name], folder).result()
    for name, line in results.items():
        if "failed" in line:
            print(f"{name}: could not run: {line['failed']}")
            continue
        line |= score(line["seen"], labels) if labels else {"unlabelled": "run --label on a card first"}
        print(
            f"{name}: {len(line['seen'])} ran, {len(line['errors'])} died; labels by {by};",
            {k: v for k, v in line.items() if k not in ("seen", "errors")},
        )
        for key, error in line["errors"].items():
            print(f"  {key}: {error}")
    if options.json:
        options.json.write_text(
            json.dumps(results | {"torch_version": torch.__version__, "labels_by": by}, indent=1) + "\n"
        )
    return int(any("failed" in line or line["errors"] for line in results.values()))


if __name__ == "__main__":
    sys.exit(main())
