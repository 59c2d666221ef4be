"""One stream of SmolLM2 on a CPU beside processes that compute without end: what is kept of the fair share.

    python bench/cpu_busy.py [--busy 0,2,6] [--dtype bfloat16] [--seconds 6] [--threads N]

With T threads of ours and B busy processes on C cores, each gets C / (T + B) of a core when the scheduler is fair, and that
part of the speed alone is the fair share. Threads that wait for each other get less out of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time

import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

PROMPT, CONTEXT = 20, 1024


def compute() -> None:
    """Busy for ever."""
    while True:
        sum(range(1000))


def tokens_per_second(core: EngineCore, seconds: float, name: str) -> float:
    """Of one stream, its prompt not counted."""
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT, ignore_eos=True, detokenize=False)
    core.add(AddRequest(request_id=name, prompt_token_ids=list(range(100, 100 + PROMPT)), params=params, seed=0,
                        eos_token_ids=core.info.eos_token_ids))  # fmt: skip
    while not core.step():
        pass
    start, tokens = time.perf_counter(), 0
    while core.has_work() and time.perf_counter() - start < seconds:
        tokens += sum(len(update.new_token_ids) for update in core.step())
    elapsed = time.perf_counter() - start
    core.abort(name)
    while core.has_work():
        core.step()
    return tokens / elapsed


def main() -> None:
    """Print tokens per second, and the part of the fair share, for each number of busy processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="0,2,6")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=0, help="0: what the engine chooses")
    options = parser.parse_args()
    core = build_engine(
        EngineArgs(
            model="smollm2", dtype=options.dtype, max_model_len=CONTEXT, device="cpu", enable_prefix_caching=False
        ),
        progress=False,
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    print(f"{options.dtype}, {threads} threads on {cores} cores", flush=True)
    alone = tokens_per_second(core, options.seconds, "alone")
    for busy in (int(word) for word in options.busy.split(",")):
        others = [multiprocessing.get_context("spawn").Process(target=compute, daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        time.sleep(2.0 if busy else 0.0)  # until they have started
        speed = tokens_per_second(core, options.seconds, f"busy-{busy}")
        fair = alone * min(1.0, cores / (threads + busy))
        print(
            f"  {busy} busy processes: {speed:6.1f} tokens/s, {speed / fair:.2f} of the fair share {fair:.1f}",
            flush=True,
        )
        for other in others:
            other.kill()
            other.join()


if __name__ == "__main__":
    main()
