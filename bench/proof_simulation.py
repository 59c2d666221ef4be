"""The figures of docs/proof.md that need no GPU: the engine's feature matrix, kinds of models and random scenarios on the
simulated device, and the corpus of snippets under the simulation.

    python bench/proof_simulation.py --json bench/reports/proof/simulation.json [--scenarios 200]
    python bench/proof_simulation.py --json bench/reports/proof/simulation.json --kinds        these alone, into what is there

Every answer is compared with the synchronous oracle's; any host wait on the launching thread, race or broken invariant raises.
CPU time is this process's.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim import kinds as of_kinds
from tests.sim.harness import SMALL_SEEDS, expected, play, simulated
from tests.sim.rounding import TOLERANCE
from tests.syncs import run_corpus

DEPTHS = (1, 2, 3, 4)
SEEDS = (0, 1)
SMALL_POOL = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 24}


def matrix() -> dict[str, Any]:
    """Every feature alone, then all mixed in a pool that forces preemptions, at each depth, with graphs and without."""
    begin, sums = (
        time.process_time(),
        {"engines": 0, "steps": 0, "device_operations": 0, "requests": 0, "zombie_rows": 0},
    )
    sums |= {"readback_waits": 0, "preemptions": 0}
    alone = [requests_for([params] * 4, seed=1) for params in FEATURES.values()]
    mixed = requests_for(list(FEATURES.values()) * 2, seed=2)
    for depth in DEPTHS:
        for eager in (False, True):
            for seed in SEEDS:
                for batches, memory in ((alone, {}), ([mixed], SMALL_POOL)):
                    number = 1000 * depth + 10 * seed + eager
                    with simulated(number, run_ahead=depth, enforce_eager=eager, **memory) as (core, device, watch):
                        waits = device.timeline.host_waits
                        for batch in batches:
                            truth = expected(batch)
                            for request_id, answer in run(core, batch).items():
                                close(answer, truth[request_id], TOLERANCE)
                            sums["requests"] += len(batch)
                        stats = core.stats()
                        sums["engines"] += 1
                        sums["steps"] += stats.num_steps
                        sums["preemptions"] += stats.num_preemptions
                        sums["zombie_rows"] += watch.num_zombie_rows
                        sums["device_operations"] += device.timeline.num_executed
                        sums["readback_waits"] += device.timeline.host_waits - waits
                    print(f"depth {depth}, {'eager' if eager else 'graphs'}, seed {seed}: ok", flush=True)
    return sums | {"depths": DEPTHS, "features": len(FEATURES), "cpu_seconds": round(time.process_time() - begin, 1)}


def kinds() -> list[dict[str, Any]]:
    """Every feature on every kind of model, and what a kind refuses."""
    found = []
    with of_kinds.known():
        for name, kind in of_kinds.KINDS.items():
            begin, seen = time.process_time(), of_kinds.check(kind)
            told = bool(seen.told)
            row = {"kind": kind.what, "depth": kind.depth, "steps": seen.steps, "graph_steps": seen.graph_steps}
            row |= {"preemptions": seen.preemptions, "hits": seen.hits, "accepted": seen.accepted, "told": told}
            row |= {"judged": seen.judged.tokens, "close_calls": seen.judged.close_calls}
            row |= {"refused": {option: why for option, why in of_kinds.refusals(kind).items() if why is not None}}
            found.append(row | {"cpu_seconds": round(time.process_time() - begin, 1)})
            print(f"{name}: ok", flush=True)
    return found


def scenarios(number: int) -> dict[str, Any]:
    """Random scenarios, small and large; raises at the first that fails."""
    begin = time.process_time()
    for i in range(number):
        play(i if i % 2 else SMALL_SEEDS + i)
    return {"number": number, "cpu_seconds": round(time.process_time() - begin, 1)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--kinds", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if given.kinds:
        known = json.loads(given.json.read_text()) | {"kinds": kinds()}
        given.json.write_text(json.dumps(known, indent=1) + "\n")
        return
    report: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    snippets = run_corpus.corpus()
    report["corpus"] = run_corpus.about(snippets) | {
        "results": {name: run_corpus.run(snippets, make) for name, make in run_corpus.detectors().items()}
    }
    report["matrix"] = matrix()
    report["kinds"] = kinds()
    report["scenarios"] = scenarios(given.scenarios)
    given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"matrix": report["matrix"], "scenarios": report["scenarios"]}, indent=1))


if __name__ == "__main__":
    main()
