"""Programs of many kinds, each run plainly on the CPU and under ``headway syncs --simulate``: it must end the same way.

    python -m bench.syncs_sweep [--files NAME ...] [--only WORD ...] [--json OUT.json] [--workers N]

The programs are the functions of ``bench/programs/syncs_sweep`` that take a device, and what the generators ``each_...`` of
those files yield: (name, program). A program gives back what it computed. Both runs are processes of their own, forked with
the same seed. What it takes is printed: programs that the CPU itself cannot run here (``no CPU``: a package is missing, a
size does not fit) say nothing, and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bench.driver_waits import heard_by_the_driver
from headway.syncs.allowlist import AllowList
from headway.syncs.errors import ProbeError
from headway.syncs.findings import Log
from headway.syncs.session import watch

FOLDER = Path(__file__).parent / "programs" / "syncs_sweep"
SECONDS = 240
"""That one run may take."""
PLAIN, SIMULATED, CARD = "plain", "simulated", "card"
"""Ways to run a program: on the CPU, under the simulation, and on a card under the live guard and CUPTI."""
ALONE: dict[str, tuple[str, ...]] = {PLAIN: (), SIMULATED: (), CARD: ("live", "cupti")}
"""Detectors that watch each by itself, too, beside what all of them find together (``findings``)."""
Program = Callable[[str], Any]
Ended = dict[str, Any]
"""result: numbers by place, or error: type and text; under the simulation also findings and unproven."""


@functools.cache  # an operation can be defined once only
def module_of(name: str, folder: Path = FOLDER) -> ModuleType | None:
    """A file of programs; None if a package that it imports is missing."""
    spec = importlib.util.spec_from_file_location(f"syncs_sweep_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as missing:
        print(f"{name}: left out, {missing}")
        return None
    return module


def programs(name: str, folder: Path = FOLDER) -> dict[str, Program]:
    """Of one file: name -> program."""
    module, found = module_of(name, folder), dict[str, Program]()
    for key, value in vars(module).items() if module is not None else ():
        if not inspect.isfunction(value) or value.__module__ != f"syncs_sweep_{name}" or key.startswith("_"):
            continue
        if key.startswith("each_"):
            try:
                found |= {f"{key.removeprefix('each_')}:{part}": program for part, program in value()}
            except ImportError as missing:
                print(f"{name}/{key}: left out, {missing}")
        elif list(inspect.signature(value).parameters) == ["device"]:
            found[key] = value
    return found


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that can be compared in ``value``: place -> array, number or text."""
    if isinstance(value, torch.Tensor):
        yield place, array(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{place}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for number, part in enumerate(sorted(value) if isinstance(value, set) else value):
            yield from flat(part, f"{place}.{number}")
    elif isinstance(value, (bool, int, float, complex, np.ndarray, np.number)):
        yield place, np.asarray(value)
    elif isinstance(value, (str, torch.dtype)):
        yield place, np.asarray(str(value).replace("cuda:0", "cpu").replace("cuda", "cpu"))


def array(value: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor of any layout."""
    value = value.detach()
    if value.is_quantized:
        value = value.dequantize()
    if value.is_nested:
        parts = [part.detach().cpu().float().reshape(-1) for part in value.unbind()]
        return torch.cat(parts).numpy()
    if value.layout is not torch.strided:
        value = value.to_dense()
    value = value.cpu().resolve_conj().resolve_neg()
    return (value.float() if value.dtype == torch.bfloat16 or "float8" in str(value.dtype) else value).numpy()


def seeded(program: Program, device: str) -> dict[str, np.ndarray]:
    """The program's results, after seeding what programs draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return dict(flat(program(device)))


def attempt(program: Program, how: str, folder: Path) -> None:
    """One run in this process, whose outcome goes to ``folder``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made: dict[str, np.ndarray] = {}
    ended: Ended = {}

    def work() -> int:
        try:
            made.update(seeded(program, "cuda" if how != PLAIN else "cpu"))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            ended.update(error=text[:1500], trace="".join(traceback.format_exc())[-4000:], kind=type(error).__name__)
            if isinstance(error, ProbeError):
                raise
        return 0

    if how == CARD:
        work()  # loads kernels and makes handles, which waits, but once
        ended["live"] = told(watch(work, ["sweep"], AllowList(), driver="off").log)
        ended["cupti"] = heard_of(work)
    if how != PLAIN:
        driver = "cupti" if how == CARD else "auto"
        run = watch(work, ["sweep"], AllowList(), simulate=how == SIMULATED, driver=driver)
        ended["unproven"] = run.unproven
        ended["findings"] = told(run.log)
    else:
        work()
    np.savez(folder / "made.npz", **made)  # type: ignore[arg-type]
    (folder / "ended.json").write_text(json.dumps(ended))


def told(log: Log) -> list[dict[str, Any]]:
    """What ``log`` holds, by the names of files."""
    return [
        {"file": Path(each.site.file).name, "line": each.site.line, "kind": str(each.kind), "call": each.call}
        | {"count": each.count}
        for each in log.findings
    ]


def heard_of(work: Callable[[], int]) -> list[dict[str, Any]]:
    """What CUPTI alone hears of ``work``, of the lines that it can name: a wait on autograd's own thread has none."""
    with heard_by_the_driver() as (log, _):
        work()
    return told(log)


def run(program: Program, how: str) -> tuple[Ended, dict[str, np.ndarray]]:
    """One run, in a process of its own. ``how``: PLAIN, SIMULATED or CARD."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = multiprocessing.get_context("fork").Process(target=quiet, args=(program, how, folder))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
            return {"error": f"ran longer than {SECONDS} s", "kind": "Timeout"}, {}
        if not (folder / "ended.json").exists():
            text = (folder / "stderr.txt").read_text()[-2000:]
            return {"error": f"the process ended with {child.exitcode}: {text}", "kind": f"exit {child.exitcode}"}, {}
        with np.load(folder / "made.npz") as made:
            return json.loads((folder / "ended.json").read_text()), {key: made[key] for key in made.files}


def quiet(program: Program, how: str, folder: Path) -> None:
    """``attempt``, with what the program prints kept apart."""
    for stream, number in (("stdout", 1), ("stderr", 2)):
        target = os.open(folder / f"{stream}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(target, number)
    os.chdir(folder)
    attempt(program, how, folder)
    sys.stdout.flush()


def differing(here: dict[str, np.ndarray], there: dict[str, np.ndarray]) -> list[str]:
    """Places whose values are not the same."""
    found = [f"{place} is missing" for place in sorted(set(here) ^ set(there))]
    for place in sorted(set(here) & set(there)):
        a, b = here[place], there[place]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{place}: {a.dtype}{a.shape} against {b.dtype}{b.shape}")
        elif a.dtype.kind in "fc" and not np.allclose(a, b, rtol=2e-3, atol=2e-4, equal_nan=True):
            found.append(f"{place}: differs by {float(np.nanmax(np.abs(a - b))):.3g}")
        elif a.dtype.kind not in "fc" and not np.array_equal(a, b):
            found.append(f"{place}: {str(a)[:60]} against {str(b)[:60]}")
    return found


def compare(name: str, program: Program, how: str = SIMULATED) -> dict[str, Any]:
    """Run a program both ways: plainly on the CPU, and ``how`` (SIMULATED or CARD).

    Returns:
        verdict: same, no CPU, crash (only the simulation raised), differs (other values or another exception), or unproven.
        A card draws other numbers, so its values are not compared.
    """
    plain, here = run(program, PLAIN)
    if plain.get("kind") in ("ImportError", "ModuleNotFoundError", "Timeout"):
        return {"name": name, "verdict": "no CPU", "why": plain["error"]}
    there: dict[str, np.ndarray]
    simulated, there = run(program, how)
    line = {"name": name} | {key: simulated.get(key, []) for key in ("findings", *ALONE[how])}
    if "error" in plain:
        same = simulated.get("kind") == plain["kind"]
        verdict = "same error" if same else "no CPU"
        return line | {"verdict": verdict, "why": plain["error"], "simulated": simulated.get("error", "")}
    if "error" in simulated:
        return line | {"verdict": "crash", "why": simulated["error"], "trace": simulated.get("trace", "")}
    if how != CARD and (wrong := differing(here, there)):
        return line | {"verdict": "differs", "why": "; ".join(wrong[:5])}
    if simulated["unproven"]:
        return line | {"verdict": "unproven", "why": "; ".join(simulated["unproven"])}
    return line | {"verdict": "same", "values": len(here)}


def chosen(files: list[str], only: list[str]) -> dict[str, Program]:
    """The programs of ``files`` whose name holds one of ``only``; all, if none is asked for."""
    found: dict[str, Program] = {}
    for file in files:
        for key, program in programs(file).items():
            name = f"{file}/{key}"
            if not only or any(word in name for word in only):
                found[name] = program
    return found


def sweep(wanted: dict[str, Program], workers: int = 1, how: str = SIMULATED) -> list[dict[str, Any]]:
    """Compare all of ``wanted``, and tell each that did not end the same way."""

    def one(item: tuple[str, Program]) -> dict[str, Any]:
        line = compare(*item, how)
        if line["verdict"] != "same":
            print(f"{line['verdict']:10} {line['name']}: {' '.join(line['why'].split())[:300]}", flush=True)
        return line

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, wanted.items()))


EXPECTED = {
    "training/swa": ("crash", "torch's own average of buffers raises on CUDA, where it takes addcdiv of integers"),
    "libraries/pictures_transformed": ("differs", "torchvision resizes bytes in floats, but on the CPU in bytes"),
}
"""Programs that end otherwise under the simulation, and why: as on a card, or not served (docs/syncs.md)."""
LOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation",
)
"""Modules that many programs import, and that take long."""
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))


def unexpected(lines: list[dict[str, Any]]) -> list[str]:
    """What ended otherwise than on the CPU, unless ``EXPECTED`` says so."""
    bad = [line for line in lines if line["verdict"] in ("crash", "differs", "unproven")]
    known = [line["name"] for line in bad if EXPECTED.get(line["name"], ("", ""))[0] == line["verdict"]]
    return [f"{line['verdict']} {line['name']}: {line['why']}" for line in bad if line["name"] not in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", choices=FILES, default=FILES)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    for name in LOADED:  # once, before the forks
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    lines = sweep(chosen(given.files, given.only), given.workers)
    counts = Counter(line["verdict"] for line in lines)
    print(f"torch {torch.__version__}: {dict(counts)}")
    if given.json:
        report = {"torch": torch.__version__, "counts": counts, "programs": lines}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(unexpected(lines)))


if __name__ == "__main__":
    sys.exit(main())
