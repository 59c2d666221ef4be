"""Which calls wait for the device without torch's sync warnings saying so: the facts behind headway/syncs/unheard.json.

    python -m bench.syncs_unheard --json RECORD.json [--workers 10] [--seconds 120]     # on a card
    python -m bench.syncs_unheard --from RECORD.json                                     # writes headway/syncs/unheard.json

Samples of torch's own operator database (OpInfo), forward, the forms of ``bench/syncs_forms.py`` and some on sparse tensors run
under the live guard while CUPTI counts blocking calls. Each runs twice and the second run counts, so that first-call set-up
is no part of it. A call of the user's that blocked in the driver, of which the guard heard nothing, is unheard. The table
holds, for each such call, the decision tree over the kinds of its arguments that ``bench/syncs_rules.py`` grows.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.syncs_forms import FORMS, Form, Things
from bench.syncs_rules import grow
from headway import syncs
from headway.syncs.counting import CallCounter
from headway.syncs.findings import Wait
from headway.syncs.kinds import kinds_of
from headway.syncs.live import UNHEARD_FILE, LiveProbe
from headway.syncs.runtime import CudaRuntime
from headway.syncs.trees import Tree, parse

OUT = Path(__file__).parents[1] / "headway" / "syncs" / UNHEARD_FILE
DTYPES = (torch.float32, torch.int64)
MOST_SAMPLES = 30
"""Of one operation and dtype."""
Record = dict[str, dict[str, dict[str, int]]]
"""Call as the guard names it -> kinds of its arguments -> "unheard", "heard" or "none" -> calls."""


def sparse() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls on sparse tensors, of which the operator database has few."""
    places = torch.tensor([[0, 1, 1], [2, 0, 0]], device="cuda")
    for columns in ((), (2,)):

        def made(columns: tuple[int, ...] = columns) -> torch.Tensor:
            return torch.sparse_coo_tensor(places, torch.ones(3, *columns, device="cuda"), (2, 3, *columns))

        calls: dict[str, Callable[[torch.Tensor], object]] = {
            "coalesce": lambda x: x.coalesce(),
            "to_dense": lambda x: x.to_dense(),
            "sum": torch.sparse.sum,
            "sum of rows": lambda x: torch.sparse.sum(x, dim=1),
            "add": lambda x: x + x,
            "transpose": lambda x: x.transpose(0, 1).coalesce(),
            "index_select": lambda x: x.index_select(0, torch.tensor([1], device="cuda")),
        }
        if not columns:
            dense = torch.ones(3, 4, device="cuda")
            calls |= {
                "mm": partial(_swapped, torch.sparse.mm, dense),
                "matmul": partial(_swapped, torch.matmul, dense),
                "softmax": lambda x: torch.sparse.softmax(x, dim=1),
                "to_sparse_csr": lambda x: x.coalesce().to_sparse_csr(),
                "to_sparse_coo": lambda x: x.coalesce().to_sparse_csr().to_sparse_coo(),
                "csr matmul": lambda x: x.coalesce().to_sparse_csr() @ torch.ones(3, 4, device="cuda"),
            }
        for name, call in calls.items():
            yield name, partial(_on_a_fresh_one, call, made)


def _on_a_fresh_one(call: Callable[[torch.Tensor], object], made: Callable[[], torch.Tensor]) -> object:
    """A tensor that was coalesced before would not be coalesced again."""
    return call(made())


def _swapped(call: Callable[..., object], second: torch.Tensor, first: torch.Tensor) -> object:
    return call(first, second)


def _form(form: Form) -> object:
    return form(Things())


def _sample(op: Any, sample: Any) -> object:
    return op(sample.input, *sample.args, **sample.kwargs)


class Observer(LiveProbe):
    """The live guard, which also asks CUPTI about each call of the user's."""

    def __init__(self, counter: CallCounter) -> None:
        super().__init__(CudaRuntime(), unheard={})
        self.counter = counter
        self.record: Record = {}
        self.reported = 0

    def hear(self, wait: Wait) -> None:
        """Count what the guard says."""
        self.reported += 1

    def observed(self, label: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        kinds = kinds_of(args, kwargs)
        before = self.reported
        self.counter.take()
        try:
            return super().observed(label, function, args, kwargs)
        finally:
            waited = bool(self.counter.take().waits)
            outcome = "none" if not waited else "heard" if self.reported > before else "unheard"
            counts = self.record.setdefault(label, {}).setdefault(kinds, {})
            counts[outcome] = counts.get(outcome, 0) + 1


def runs_of(part: int, parts: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """This worker's share: name and what to run."""
    from torch.testing._internal.common_methods_invocations import op_db

    if part == 0:
        for name, run in sparse():
            yield f"sparse {name}", run
    for name, form in sorted(FORMS.items())[part::parts]:
        yield f"form {name}", partial(_form, form)
    for op in op_db[part::parts]:
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cuda"):
                continue
            for sample in itertools.islice(op.sample_inputs("cuda", dtype), MOST_SAMPLES):
                yield f"op {op.name}", partial(_sample, op, sample)


def work(options: argparse.Namespace) -> None:
    """One worker: its record, and what could not run."""
    errors: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    last = ""
    with CallCounter() as counter:
        observer = Observer(counter)
        path = Path(f"{options.json}.{options.worker}")
        for name, run in runs_of(options.worker, options.workers):
            if time.monotonic() > end:
                errors["out of time"] += 1
                break
            try:
                run()
                torch.cuda.synchronize()
                with syncs.record(probes=(observer,)) as log:
                    log.add = observer.hear  # type: ignore[method-assign]
                    run()
            except Exception as error:
                if "CUDA error" in str(error):
                    raise
                errors[f"{name}: {str(error)[:80]}"] += 1
            if name != last:
                path.write_text(json.dumps({"record": observer.record, "errors": errors}))
                last = name
        path.write_text(json.dumps({"record": observer.record, "errors": errors}))


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """All workers' records as one."""
    total: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    errors: Counter[str] = Counter()
    for part in range(options.workers):
        path = Path(f"{options.json}.{part}")
        if not path.exists():
            errors[f"worker {part} wrote nothing"] += 1
            continue
        found = json.loads(path.read_text())
        errors.update(found["errors"])
        for label, by_kind in found["record"].items():
            for kinds, counts in by_kind.items():
                total[label][kinds].update(counts)
    calls = {
        label: {kinds: dict(counts) for kinds, counts in sorted(by_kind.items())}
        for label, by_kind in sorted(total.items())
        if any("unheard" in counts for counts in by_kind.values())
    }
    about = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}
    return {**about, "labels": len(total), "errors": dict(errors.most_common(30)), "calls": calls}


def table(record: dict[str, Any]) -> dict[str, Any]:
    """Label -> the tree that tells arguments whose waits are unheard from others, of labels that have such."""
    calls: dict[str, Tree] = {}
    for label, by_kind in record["calls"].items():
        examples = [(parse(kinds), mostly_unheard(counts)) for kinds, counts in by_kind.items()]
        tree = grow(examples)
        if tree is not False:
            calls[label] = tree
    made_by = "bench/syncs_unheard.py; do not edit"
    return {"made_by": made_by, "torch": record["torch"], "card": record["card"], "calls": calls}


def mostly_unheard(counts: dict[str, int]) -> bool:
    """Of calls of the same kinds; kinds say nothing of numbers, and where there is nothing to do nobody waits."""
    return 2 * counts.get("unheard", 0) > sum(counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record to write")
    parser.add_argument("--from", dest="record", type=Path, help="a record; writes the table, and needs no card")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    if options.record is not None:
        found = table(json.loads(options.record.read_text()))
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{OUT.name}: {len(found['calls'])} calls")
        return
    if options.json is None:
        parser.error("--json or --from")
    warnings.simplefilter("ignore")
    if options.worker is not None:
        work(options)
        return
    command = [sys.executable, "-m", "bench.syncs_unheard", "--json", str(options.json)]
    command += ["--workers", str(options.workers), "--seconds", str(options.seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, "--worker", str(part)], env=environment) for part in range(options.workers)]
    for worker in workers:
        worker.wait()
    found = collect(options)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['labels']} calls ran; of {len(found['calls'])} some waits are unheard: {', '.join(found['calls'])}")


if __name__ == "__main__":
    main()
