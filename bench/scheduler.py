"""Host cost of the scheduler: microseconds per decode step (schedule + apply), by number of rows.

Usage: python bench/scheduler.py [rows ...]
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from headway.core.config import SchedulerConfig
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan, StepResult
from headway.scheduler import Scheduler

PROMPT, DEPTH, WARM, STEPS = 64, 2, 20, 400


def fake_result(plan: StepPlan) -> StepResult:
    n = plan.num_rows
    return StepResult(plan.samples.copy(), np.full(n, 7, np.int32), np.zeros(n, np.int32))


def start(rows: int, caching: bool) -> Scheduler:
    length = PROMPT + WARM + STEPS + rows + 64
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=length,
        block_size=16,
        num_blocks=rows * (length // 16 + 2) + 2,
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(config)
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = rng.integers(0, 1000, PROMPT + i % 16).tolist()  # block boundaries spread over the steps
        params = SamplingParams(max_tokens=length - len(prompt), temperature=0.0)
        scheduler.add(
            AddRequest(request_id=f"request-{i}", prompt_token_ids=prompt, params=params, seed=i, eos_token_ids=[2])
        )
    return scheduler


def measure(rows: int, caching: bool) -> tuple[list[float], list[float]]:
    """Microseconds of every schedule() and of every apply() once all rows decode."""
    scheduler = start(rows, caching)
    flight: list[StepPlan] = []
    schedule_us: list[float] = []
    apply_us: list[float] = []
    while len(schedule_us) < STEPS + WARM:
        t0 = time.perf_counter_ns()
        plan = scheduler.schedule()
        t1 = time.perf_counter_ns()
        assert plan is not None
        flight.append(plan)
        if len(flight) <= DEPTH:
            continue
        oldest = flight.pop(0)
        result = fake_result(oldest)
        t2 = time.perf_counter_ns()
        scheduler.apply(oldest, result)
        t3 = time.perf_counter_ns()
        if oldest.num_decode_rows == rows:
            schedule_us.append((t1 - t0) / 1e3)
            apply_us.append((t3 - t2) / 1e3)
    return schedule_us[WARM:], apply_us[WARM:]


def main() -> None:
    out = sys.stdout.write
    out(f"{'rows':>5} {'cache':>5} {'schedule':>9} {'apply':>9} {'both':>9} {'both p95':>9}   us per step (median)\n")
    for rows in [int(a) for a in sys.argv[1:]] or [1, 64, 256, 512]:
        for caching in (True, False):
            first, second = measure(rows, caching)
            both = sorted(a + b for a, b in zip(first, second, strict=True))
            p95 = both[len(both) * 95 // 100]
            out(
                f"{rows:>5} {'on' if caching else 'off':>5} {statistics.median(first):>9.1f} "
                f"{statistics.median(second):>9.1f} {statistics.median(both):>9.1f} {p95:>9.1f}\n"
            )


if __name__ == "__main__":
    main()
