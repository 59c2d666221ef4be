"""What does a start consist of, with an empty Triton cache and with a full one? Self-checking; 1.5 minutes on an H200.

    python bench/cold_start.py [MODEL ...] [--json FILE] [--device cuda]

A model is a folder (weights are random) or the name of a shape of ``headway bench anchors``. Each is started once with an empty
cache and twice with what the first start left there, in processes of their own. Checked: the time to the first token with an
empty cache (15 s; 20 s above 4096 hidden), that no kernel is compiled or read where it is launched, and that a warm start
compiles none.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parents[1] / "headway/cli/bench/anchors/models"
WARM_STARTS = 2
LIMIT_S, LARGE_LIMIT_S = 15.0, 20.0
TIMEOUT_S = 200.0


@dataclass
class Compiler:
    """Triton's listener.

    Attributes:
        compiled: kernels that this process compiled.
        loaded: how many were read from the disk.
        late: what the main thread compiled or read.
    """

    compiled: list[str] = field(default_factory=list)
    loaded: int = 0
    late: list[str] = field(default_factory=list)

    def __call__(self, *, src: Any, cache_hit: bool, **others: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self.late.append(src.name)
        if cache_hit:
            self.loaded += 1
        else:
            self.compiled.append(src.name)


class Phases(logging.Handler):
    """Finds the phases in the engine's log."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.compiled = 0

    def emit(self, record: logging.LogRecord) -> None:
        said, args = str(record.msg), record.args
        if said.startswith("imports") and isinstance(args, tuple):
            self.seconds["imports"] = float(str(args[0]))
        elif said.startswith("engine ready") and isinstance(args, tuple):
            self.seconds |= args[1].seconds  # type: ignore[union-attr]
        elif said.endswith("compiled") and isinstance(args, tuple):
            self.compiled += int(str(args[2]))
        print(f"    {record.getMessage()}", file=sys.stderr)


@contextmanager
def watched(on_cuda: bool) -> Iterator[tuple[Compiler, Phases]]:
    """Listens to the compiler and to the log."""
    compiler, phases = Compiler(), Phases()
    logging.getLogger("headway").addHandler(phases)
    logging.getLogger("headway").setLevel(logging.INFO)
    if on_cuda:
        importlib.import_module("triton").knobs.compilation.listener = compiler
    yield compiler, phases


def child() -> None:
    """Start, generate a token, say what it took. Standard input: engine arguments and the time of the parent's start."""
    given = json.load(sys.stdin)
    with watched(given["engine"]["device"] == "cuda") as (compiler, phases):
        from headway import LLM, SamplingParams

        imported = time.time()
        with LLM(**given["engine"]) as llm:
            ready = time.time()
            params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
            done = time.time()
    inside = sum(phases.seconds.values())
    parts = {
        "interpreter": imported - given["start"], **phases.seconds,
        "rest": ready - imported - inside, "first token": done - ready,
    }  # fmt: skip
    print(json.dumps({
        "total_s": done - given["start"], "phases_s": parts, "compiled": phases.compiled + len(compiler.compiled),
        "loaded": compiler.loaded, "late": compiler.late,
    }))  # fmt: skip


def start(engine: dict[str, Any], cache: Path) -> dict[str, Any]:
    """One start with Triton's cache in ``cache``."""
    run = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=json.dumps({"engine": engine, "start": time.time()}), env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(folder: Path, device: str) -> dict[str, dict[str, Any]]:
    """A cold start and some warm ones; the last is kept."""
    engine = {"model": str(folder), "load_format": "dummy", "device": device, "skip_tokenizer_init": True}
    engine |= {"max_model_len": 4096, "max_num_seqs": 512} if device == "cuda" else {"max_model_len": 128}
    with tempfile.TemporaryDirectory() as cache:
        found = {"cold": start(engine, Path(cache))}
        for _ in range(WARM_STARTS):
            found["warm"] = start(engine, Path(cache))
    return found


def complaints(folder: Path, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is not as it should be."""
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    limit = LARGE_LIMIT_S if hidden >= 4096 else LIMIT_S
    if found["cold"]["total_s"] > limit:
        yield f"{folder.name}: {found['cold']['total_s']:.1f} s to the first token; the goal is {limit:.0f}"
    for name, row in found.items():
        if row["late"]:
            yield f"{folder.name}, {name}: outside of the pool: {', '.join(row['late'])}"
    if found["warm"]["compiled"]:
        yield f"{folder.name}: a warm start compiles {found['warm']['compiled']} kernels"


def show(name: str, found: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{name:16s} " + " ".join(f"{kind:>8s}" for kind in found))
    for phase in found["cold"]["phases_s"]:
        print(f"  {phase:14s} " + " ".join(f"{row['phases_s'].get(phase, 0.0):8.2f}" for row in found.values()))
    for key in ("total_s", "compiled", "loaded"):
        print(f"  {key:14s} " + " ".join(f"{row[key]:8.4g}" for row in found.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["qwen3_06b", "llama_8b"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report, wrong = {}, []
    for name in args.models:
        folder = SHAPES / name if (SHAPES / name).is_dir() else Path(name)
        report[folder.name] = found = measure(folder, args.device)
        show(folder.name, found)
        wrong += complaints(folder, found)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(wrong) or "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    else:
        sys.exit(main())
