"""Host time of the engine's loop per decode step, over a device that computes nothing (``tests.engine.paced_device``).

    python -m bench.host_loop [rows ...] [--step-us 900] [--wait skip] [--answers] [--logprobs 5] [--calls] [--profile 30]
    python -m bench.host_loop --model headway/cli/bench/anchors/models/qwen3_06b [--wait sleep] [--calls] [--json FILE] on a GPU

The whole loop is the real one: scheduler, packed step, graphs' choice, readback, updates, meters; what is missing without a
GPU is the driver's own time (an upload, a graph's launch, a readback, events). ``step`` is the wall's time less back-pressure,
``rest`` what of it lies between the three parts, ``updates`` msgpack of a step's updates, as it goes to the front end's
socket: best of several rounds, in microseconds. ``median`` is the median round of ``step``. With ``--answers``, ``step`` has
the output processor's work in it, too, as in ``LLM.generate``, and ``answers`` is that. ``--calls`` times calls one by one.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch

import headway.runner.results
from headway.api.inputs import PreparedRequest
from headway.api.output_processor import OutputProcessor
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, StepUpdates
from headway.core.params import SamplingParams
from headway.device.cuda import CudaEvent, CudaGraph
from headway.device.readback import Readback
from headway.device.staging import StagingRing
from headway.device.step_clock import StepClock
from headway.engine import channel
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.metrics import StepMeter
from headway.scheduler import Scheduler
from tests.engine.paced_device import PacedClock, PacedDevice, PacedGraph

PROMPT, SETTLE, STEPS, ROUNDS = 24, 60, 64, 32
CALLS: list[tuple[type, str]] = [
    (Scheduler, "schedule"), (Scheduler, "apply"), (StagingRing, "acquire"), (StagingRing, "send"), (StepClock, "submit"),
    (StepClock, "measure"), (CudaGraph, "replay"), (PacedGraph, "replay"), (Readback, "start"), (StepMeter, "stamp"),
]  # fmt: skip
TOKEN = 7
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
"""A model as small as can be: what it computes at start-up is thrown away."""


def engine(folder: Path, max_rows: int, device: PacedDevice | None, run_ahead: str) -> EngineCore:
    """An engine for up to ``max_rows`` rows, over ``device`` or, without one, over a GPU with the model in ``folder``."""
    common: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": max_rows, "max_num_batched_tokens": 8192,
        "skip_tokenizer_init": True, "run_ahead": run_ahead if run_ahead == "auto" else int(run_ahead),
    }  # fmt: skip
    if device is None:
        return build_engine(EngineArgs(model=str(folder), device="cuda", dtype="bfloat16", **common), progress=False)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    args = EngineArgs(model=str(folder), dtype="float32", kv_cache_memory_bytes=1 << 28, **common)
    return build_engine(args, progress=False, device=device)


def fake_tokens(core: EngineCore) -> None:
    """Without a GPU, every row of every result from now on has sampled ``TOKEN`` and goes on."""
    if core._runner.device.torch_device.type == "cuda":  # noqa: SLF001 - the bench stands where the device would
        return
    results = core._runner.executor.body.results  # noqa: SLF001
    results.zero_()
    results[:, :, 0], results[:, :, 1] = 1, TOKEN


def fake_logprobs(number: int) -> None:
    """Without a GPU, every position from now on has ``number`` log-probabilities beside its own."""
    unpack = headway.runner.results._logprobs  # noqa: SLF001 - the bench stands where the device would

    def unpack_some(*packet: Any) -> Any:
        part, end = unpack(*packet)
        part.token_ids[:], part.counts[:] = range(part.token_ids.shape[1]), 1 + number
        return part, end

    headway.runner.results._logprobs = unpack_some  # type: ignore[assignment]  # noqa: SLF001


def start(core: EngineCore, rows: int, logprobs: int | None, answers: OutputProcessor) -> None:
    """Put ``rows`` requests into steady decode."""
    rng = random.Random(rows)
    params = SamplingParams(temperature=0.0, max_tokens=3900, ignore_eos=True, detokenize=False, logprobs=logprobs)
    for row in range(rows):
        prompt = [rng.randrange(64) for _ in range(PROMPT + row % 16)]  # block boundaries spread over the steps
        name = f"{rows}-{row}"
        request = AddRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=row, eos_token_ids=[])
        answers.open(PreparedRequest(None, prompt, params, name, [request]), name)
        core.add(request)
    fake_tokens(core)
    while core.stats().num_waiting or core.stats().num_running < rows:
        core.step()
        fake_tokens(core)
    for _ in range(SETTLE):
        core.step()


def stop(core: EngineCore, rows: int) -> None:
    """End them."""
    for row in range(rows):
        core.abort(f"{rows}-{row}")
    while core.has_work():
        core.step()


def one_round(core: EngineCore, answers: OutputProcessor | None) -> tuple[dict[str, float], StepUpdates]:
    """Microseconds per step, by part; and the last step's updates."""
    before, begin = core.stats(), time.perf_counter()
    updates, answering = StepUpdates(), 0.0
    for _ in range(STEPS):
        updates = core.step()
        if answers is not None:
            stepped = time.perf_counter()
            answers.apply(updates)
            answering += time.perf_counter() - stepped
    wall = time.perf_counter() - begin
    after = core.stats()

    def spent(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / STEPS * 1e6

    parts = {name: spent(f"{name}_seconds") for name in ("schedule", "launch", "apply")}
    if answers is not None:
        parts["answers"] = answering / STEPS * 1e6
    total = wall / STEPS * 1e6 - spent("back_pressure_seconds")
    return {"step": total, **parts, "rest": total - sum(parts.values())}, updates


def timed_calls(core: EngineCore) -> list[str]:
    """A line a call of ``CALLS``: how many a step, microseconds each. Everything is a little slower meanwhile."""
    spent: dict[str, list[float]] = {}

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = call(*given, **named)
            spent.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
            return result

        return wrapped

    with ExitStack() as stack:
        for owner, method in CALLS:
            name = f"{owner.__name__}.{method}"
            stack.enter_context(patch.object(owner, method, timed(getattr(owner, method), name)))
        for _ in range(4 * STEPS):
            core.step()
    return [f"{name:24}{len(us) / 4 / STEPS:6.2f} a step{mean(us):9.1f} us" for name, us in spent.items()]


def encode_us(updates: StepUpdates) -> float:
    """Microseconds to encode a step's updates."""
    report = channel.Updates(updates)
    begin = time.perf_counter()
    for _ in range(STEPS):
        channel.encode(report)
    return (time.perf_counter() - begin) / STEPS * 1e6


def measure(
    core: EngineCore, rows: int, *, profiled: int, calls: bool, logprobs: int | None, answering: bool
) -> dict[str, float]:
    """The best of several rounds at ``rows`` rows."""
    processor = OutputProcessor(None)
    answers = processor if answering else None
    start(core, rows, logprobs, processor)
    rounds = []
    updates = StepUpdates()
    for _ in range(ROUNDS):
        found, updates = one_round(core, answers)
        rounds.append(found)
    best = min(rounds, key=lambda each: each["step"])
    best["median"] = median(each["step"] for each in rounds)
    best["updates"] = min(encode_us(updates) for _ in range(ROUNDS))
    stats: EngineStats = core.stats()
    best["depth"] = stats.run_ahead
    if calls:
        sys.stdout.write("".join(f"{rows:>5} {line}\n" for line in timed_calls(core)))
    if profiled:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(STEPS):
            core.step()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(profiled)
    stop(core, rows)
    return best


def wait_asleep() -> None:
    """Whoever waits for an event made from now on is woken by the driver."""

    def make(self: CudaEvent, timing: bool) -> None:
        self.raw = torch.cuda.Event(enable_timing=timing, blocking=True)

    CudaEvent.__init__ = make  # type: ignore[method-assign]


def main() -> None:
    """Print a row per row count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--step-us", type=float, default=900.0, help="what a step takes on the device")
    parser.add_argument("--run-ahead", default="auto")
    parser.add_argument("--model", type=Path, help="folder of a model's config.json: measure on a GPU, random weights")
    parser.add_argument(
        "--wait", choices=("skip", "sleep", "spin"), default="skip",
        help="for the device; a GPU is waited for asleep or spinning, without one no time passes unless it is asked for",
    )  # fmt: skip
    parser.add_argument("--answers", action="store_true", help="with the output processor's work")
    parser.add_argument("--logprobs", type=int, help="of each row")
    parser.add_argument("--calls", action="store_true", help="time calls of the host one by one")
    parser.add_argument("--profile", type=int, default=0, help="list this many functions of the host's time (cProfile)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = None if options.model else PacedDevice(options.step_us * 1e-6, PacedClock(waits=options.wait))
    if options.model and options.wait == "sleep":
        wait_asleep()
    if device is not None and options.logprobs is not None:
        fake_logprobs(options.logprobs)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        core = engine(options.model or Path(folder), max(options.rows), device, options.run_ahead)
        gc.collect()
        gc.freeze()
        for rows in options.rows:
            found[rows] = measure(
                core,
                rows,
                profiled=options.profile,
                calls=options.calls,
                logprobs=options.logprobs,
                answering=options.answers,
            )
            if not found or rows == options.rows[0]:
                sys.stdout.write(f"{'rows':>5}" + "".join(f"{name:>10}" for name in found[rows]) + "\n")
            sys.stdout.write(f"{rows:>5}" + "".join(f"{value:>10.1f}" for value in found[rows].values()) + "\n")
        core.shutdown()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
