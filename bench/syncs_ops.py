"""Record on a GPU which ATen operations wait for the device: the facts behind the rules of ``headway syncs --simulate``.

    python -m bench.syncs_ops --json OUT.json [--workers 8] [--seconds 240] [--only NAME ...]

Runs every sample of torch's own operator database (OpInfo), forward and backward, and the forms of ``bench/syncs_forms.py``,
under a dispatch mode. CUPTI counts the blocking calls inside each ATen operation. Each sample runs twice and the second run
counts, so that first-call set-up (handles, workspaces) is no part of it. The record keeps, for each overload and each kind of
arguments, how many calls waited, by the driver's name of the wait, and how many did not.

Needs a CUDA build of torch, cupti-python, and expecttest (torch's operator database imports it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.syncs_forms import FORMS, Form, Things
from headway.syncs.counting import CallCounter
from headway.syncs.kinds import kinds_of

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.uint8)
MOST_SAMPLES = 60
"""Of one operation and dtype."""
Record = dict[str, dict[str, dict[str, int]]]
"""Overload -> kind of arguments -> driver's name of a wait, or "none" -> calls."""


class Observer(TorchDispatchMode):
    """Counts the waits inside each ATen operation of this thread and of the autograd threads it starts."""

    def __init__(self, counter: CallCounter, record: Record) -> None:
        super().__init__()
        self.counter, self.record = counter, record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = kinds_of(args, kwargs)
        self.counter.take()
        try:
            return func(*args, **kwargs)
        finally:
            calls = self.counter.take()
            found = self.record.setdefault(str(func), {}).setdefault(kinds, {})
            names = set(calls.waits) or {"none"}
            for name in names:
                found[name] = found.get(name, 0) + 1


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def run_sample(op: Any, sample: Any, backward: bool) -> None:
    """The operation, and its gradient where it has one."""
    result = op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return
    inputs = [t for t in tensors([sample.input, sample.args, sample.kwargs]) if t.requires_grad]
    outputs = [t for t in tensors(result) if t.requires_grad]
    if inputs and outputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)


def run_op(op: Any, counter: CallCounter, record: Record, errors: Counter[str]) -> None:
    """All samples of an entry of the operator database."""
    supported = op.supported_dtypes("cuda")
    differentiable = op.supported_backward_dtypes("cuda")
    for dtype in DTYPES:
        if dtype not in supported:
            continue
        backward = dtype in differentiable and op.supports_autograd
        samples = op.sample_inputs("cuda", dtype, requires_grad=backward)
        for sample in itertools.islice(samples, MOST_SAMPLES):
            try:
                run_sample(op, sample, backward)
                with Observer(counter, record):
                    run_sample(op, sample, backward)
            except Exception as error:
                if "CUDA error" in str(error):
                    raise
                errors[f"{op.name}: {str(error)[:80]}"] += 1


def work(options: argparse.Namespace, part: int) -> None:
    """One worker's share: a line of JSON for each operation, so that a crash loses only the operation it came from."""
    from torch.testing._internal.common_methods_invocations import op_db

    mine = [(f"op {index} {op.name}.{op.variant_test_name}", op) for index, op in enumerate(op_db)]
    mine = [each for each in mine if int(each[0].split()[1]) % options.workers == part]
    forms = [(f"form {name}", form) for name, form in sorted(FORMS.items())][part :: options.workers]
    path = Path(f"{options.json}.{part}")
    done = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.exists() else set()
    end = time.monotonic() + options.seconds
    with CallCounter() as counter, path.open("a") as out:
        for name, item in [*forms, *mine]:
            if name in done or (options.only and not any(word in name for word in options.only)):
                continue
            if time.monotonic() > end:
                break
            out.write(json.dumps({"name": name, "begun": True}) + "\n")  # should it crash, the next start leaves it out
            out.flush()
            record: Record = {}
            errors: Counter[str] = Counter()
            whole: dict[str, int] = {}
            if name.startswith("form "):
                whole = run_form(item, counter, record, errors)
            else:
                run_op(item, counter, record, errors)
            out.write(json.dumps({"name": name, "record": record, "errors": errors, "whole": whole}) + "\n")
            out.flush()


def run_form(form: Form, counter: CallCounter, record: Record, errors: Counter[str]) -> dict[str, int]:
    """A line of user code: what its ATen operations did goes to ``record``; returns what all of it did at the driver."""
    try:
        form(Things())
        things = Things()
        torch.cuda.synchronize()
        with Observer(counter, record):
            form(things)
        things = Things()
        torch.cuda.synchronize()
        counter.take()
        form(things)
        calls = counter.take()
        return {**calls.waits, **{f"copy {kind}": number for kind, number in calls.copies.items()}}
    except Exception as error:
        errors[f"{type(error).__name__}: {str(error)[:120]}"] += 1
        return {}


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """All workers' lines as one record."""
    total: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    forms, errors, crashed, begun, finished = {}, Counter[str](), [], set(), set()
    for part in range(options.workers):
        path = Path(f"{options.json}.{part}")
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry.get("begun"):
                begun.add(entry["name"])
                continue
            finished.add(entry["name"])
            errors.update(entry["errors"])
            if entry["name"].startswith("form "):
                forms[entry["name"].removeprefix("form ")] = {"driver": entry["whole"], "ops": entry["record"]}
            for overload, by_kind in entry["record"].items():
                for kinds, counts in by_kind.items():
                    total[overload][kinds].update(counts)
    crashed = sorted(begun - finished)
    return {
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "finished": len(finished),
        "crashed": crashed,
        "errors": dict(errors.most_common(40)),
        "forms": forms,
        "ops": {
            overload: {kinds: dict(counts) for kinds, counts in sorted(by_kind.items())}
            for overload, by_kind in sorted(total.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of operations or forms")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker is not None:
        work(options, options.worker)
        return
    end = time.monotonic() + options.seconds
    command = [sys.executable, "-m", "bench.syncs_ops", "--json", str(options.json), "--workers", str(options.workers)]
    command += ["--only", *options.only] if options.only else []
    running: dict[int, subprocess.Popen[bytes]] = {}

    def start(part: int) -> None:
        left = max(end - time.monotonic(), 1)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running[part] = subprocess.Popen([*command, "--worker", str(part), "--seconds", str(left)], env=environment)

    for part in range(options.workers):
        start(part)
    while running and time.monotonic() < end + 30:
        time.sleep(0.2)
        for part, process in list(running.items()):
            if process.poll() is not None:
                del running[part]
                if process.returncode and time.monotonic() < end:
                    start(part)  # a crash: an illegal address ends the process's context
    for process in running.values():
        process.kill()
    found = collect(options)
    options.json.write_text(json.dumps(found, indent=1))
    waiting = sum(any(set(counts) - {"none"} for counts in by_kind.values()) for by_kind in found["ops"].values())
    print(f"{found['finished']} operations and forms, {len(found['ops'])} overloads, {waiting} of them wait sometimes")
    print("crashed:", *found["crashed"] or ["none"])


if __name__ == "__main__":
    main()
