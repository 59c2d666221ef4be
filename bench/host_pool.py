"""Host time per text of an encoder's whole way through ``LLM``, over a device that computes nothing.

    python -m bench.host_pool [lengths ...] [--texts 4096] [--hidden 64] [--step-us 500] [--task embed] [--profile 30]

Prompts are token ids. ``schedule``, ``launch`` and ``apply`` are the engine's parts; ``rest`` is what the door and the outputs
take beside them (with back-pressure, which takes no time here). Best of several rounds, microseconds a text. What is missing
without a GPU is the driver's own time, some 60 us a step. A step holds 256 texts at most, as it does on a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway import LLM
from headway.core.config import EngineArgs
from headway.engine import early
from headway.engine.core import EngineCore
from tests.engine.paced_device import PacedClock, PacedDevice

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "vocab_size": 30522, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
    "hidden_act": "gelu", "type_vocab_size": 2, "torch_dtype": "float32",
}  # fmt: skip
ROUNDS = 5
PARTS = ("schedule", "launch", "apply")


def build(args: EngineArgs) -> EngineCore:
    """The engine of ``LLM``, over a device whose steps take ``HOST_POOL_STEP_US``."""
    from headway.engine.boot import build_engine

    seconds = float(os.environ["HOST_POOL_STEP_US"]) * 1e-6
    return build_engine(args, progress=False, device=PacedDevice(seconds, PacedClock()))


def one_round(llm: LLM, prompts: list[list[int]], task: str) -> dict[str, float]:
    """Microseconds a text."""
    before, start = llm.stats(), time.perf_counter()
    if task == "array":
        llm.embed(prompts, use_tqdm=False, as_numpy=True)
    else:
        llm.encode(prompts, pooling_task=task, use_tqdm=False)
    wall = time.perf_counter() - start
    after = llm.stats()
    spent = {
        part: (getattr(after, f"{part}_seconds") - getattr(before, f"{part}_seconds")) / len(prompts) * 1e6
        for part in PARTS
    }
    whole = wall / len(prompts) * 1e6
    return {"whole": whole, **spent, "engine": sum(spent.values()), "rest": whole - sum(spent.values())}


def main() -> None:
    """Print a row per length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64, help="numbers of a vector")
    parser.add_argument("--step-us", type=float, default=500.0)
    parser.add_argument("--task", default="array", help="embed, token_embed; array: embed(as_numpy=True)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--profile", type=int, default=0)
    options = parser.parse_args()
    os.environ["HOST_POOL_STEP_US"] = str(options.step_us)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({**CONFIG, "hidden_size": options.hidden})
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        sizes: dict[str, Any] = {"max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": 8192}
        with patch.object(early, "build_engine", build):
            llm = LLM(folder, dtype="float32", load_format="dummy", skip_tokenizer_init=True, **sizes)
        gc.collect()
        gc.freeze()
        rng = random.Random(0)
        for length in options.lengths:
            prompts = [rng.choices(range(1000, 30000), k=length) for _ in range(options.texts)]
            one_round(llm, prompts[:512], options.task)
            best = min((one_round(llm, prompts, options.task) for _ in range(ROUNDS)), key=lambda each: each["whole"])
            if length == options.lengths[0]:
                sys.stdout.write(f"{'tokens':>7}" + "".join(f"{name:>10}" for name in best) + "\n")
            sys.stdout.write(f"{length:>7}" + "".join(f"{value:>10.2f}" for value in best.values()) + "\n")
            if options.profile:
                profiler = cProfile.Profile()
                profiler.enable()
                one_round(llm, prompts, options.task)
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(options.profile)
        llm.close()


if __name__ == "__main__":
    main()
