"""Host time of the engine's loop per decode step, over a device that computes nothing (``tests.engine.paced_device``).

    python -m bench.host_loop [rows ...] [--step-us 900] [--sleep] [--profile 30] [--json FILE]
    python -m bench.host_loop --model headway/cli/bench/anchors/models/qwen3_06b [--sleep]        on a GPU

The whole loop is the real one: scheduler, packed step, graphs' choice, readback, updates, meters; what is missing without a
GPU is the driver's own time (an upload, a graph's launch, a readback, events). ``step`` is the wall's time less back-pressure,
``rest`` what of it lies between the three parts, ``updates`` msgpack of a step's updates, as it goes to the front end's
socket: best of several rounds, in microseconds. ``median`` is the median round of ``step``.
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
from pathlib import Path
from statistics import median
from typing import Any

import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, StepUpdates
from headway.core.params import SamplingParams
from headway.device.cuda import CudaEvent
from headway.engine import channel
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.paced_device import PacedClock, PacedDevice

PROMPT, SETTLE, STEPS, ROUNDS = 24, 60, 64, 32
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
    results = core._runner._results  # noqa: SLF001
    results.zero_()
    results[:, :, 0], results[:, :, 1] = 1, TOKEN


def start(core: EngineCore, rows: int) -> None:
    """Put ``rows`` requests into steady decode."""
    rng = random.Random(rows)
    for row in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=3900, ignore_eos=True, detokenize=False)
        prompt = [rng.randrange(64) for _ in range(PROMPT + row % 16)]  # block boundaries spread over the steps
        core.add(
            AddRequest(request_id=f"{rows}-{row}", prompt_token_ids=prompt, params=params, seed=row, eos_token_ids=[])
        )
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


def one_round(core: EngineCore) -> tuple[dict[str, float], StepUpdates]:
    """Microseconds per step, by part; and the last step's updates."""
    before, begin = core.stats(), time.perf_counter()
    updates = StepUpdates()
    for _ in range(STEPS):
        updates = core.step()
    wall = time.perf_counter() - begin
    after = core.stats()

    def spent(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / STEPS * 1e6

    parts = {name: spent(f"{name}_seconds") for name in ("schedule", "launch", "apply")}
    total = wall / STEPS * 1e6 - spent("back_pressure_seconds")
    return {"step": total, **parts, "rest": total - sum(parts.values())}, updates


def encode_us(updates: StepUpdates) -> float:
    """Microseconds to encode a step's updates."""
    report = channel.Updates(updates)
    begin = time.perf_counter()
    for _ in range(STEPS):
        channel.encode(report)
    return (time.perf_counter() - begin) / STEPS * 1e6


def measure(core: EngineCore, rows: int, profiled: int) -> dict[str, float]:
    """The best of several rounds at ``rows`` rows."""
    start(core, rows)
    rounds = []
    updates = StepUpdates()
    for _ in range(ROUNDS):
        found, updates = one_round(core)
        rounds.append(found)
    best = min(rounds, key=lambda each: each["step"])
    best["median"] = median(each["step"] for each in rounds)
    best["updates"] = min(encode_us(updates) for _ in range(ROUNDS))
    stats: EngineStats = core.stats()
    best["depth"] = stats.run_ahead
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
    parser.add_argument("--sleep", action="store_true", help="wait for the device asleep; without a GPU, in real time")
    parser.add_argument("--profile", type=int, default=0, help="list this many functions of the host's time (cProfile)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = None if options.model else PacedDevice(options.step_us * 1e-6, PacedClock(sleeps=options.sleep))
    if options.model and options.sleep:
        wait_asleep()
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        core = engine(options.model or Path(folder), max(options.rows), device, options.run_ahead)
        gc.collect()
        gc.freeze()
        for rows in options.rows:
            found[rows] = measure(core, rows, options.profile)
            if not found or rows == options.rows[0]:
                sys.stdout.write(f"{'rows':>5}" + "".join(f"{name:>10}" for name in found[rows]) + "\n")
            sys.stdout.write(f"{rows:>5}" + "".join(f"{value:>10.1f}" for value in found[rows].values()) + "\n")
        core.shutdown()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
