"""The anchor workloads of generation on this machine's card: inter-token latency, the nano-vllm bench, prefill, first token.

    python bench/anchors.py --model bench/models/qwen3_06b --out bench/reports/NAME.json [--quick]

Dummy weights, prompts as token ids, no detokenising. ITL is the difference of two output lengths, so that prefill cancels.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch

from headway import SamplingParams
from headway.api.llm import LLM

ROWS = (1, 8, 64, 256)
VARIANTS: dict[str, dict[str, Any]] = {
    "topk_topp": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "logprobs5": {"temperature": 0.0, "logprobs": 5},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "seeded": {"temperature": 1.0, "seed": 7},
}


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Random token ids."""
    return [[rng.randrange(10_000) for _ in range(length)] for _ in range(count)]


def seconds(llm: LLM, batch: list[list[int]], num_tokens: int, **params: Any) -> float:
    """Wall time of one generate call."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **params)
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), "a request ended early"
    return elapsed


def itl_ms(llm: LLM, rows: int, short: int, long: int, repeats: int, **params: Any) -> float:
    """Milliseconds per decode step at ``rows`` rows; best of ``repeats``."""
    rng = random.Random(rows)
    seconds(llm, prompts(rng, rows, 128), 8, **params)  # kernels this shape needs are loaded outside of the timing
    figures = []
    for _ in range(repeats):
        batch = prompts(rng, rows, 128)
        few = seconds(llm, batch, short, **params)
        many = seconds(llm, prompts(rng, rows, 128), long, **params)
        figures.append((many - few) / (long - short) * 1e3)
    return min(figures)


def nano(llm: LLM) -> tuple[float, int]:
    """The nano-vllm bench: output tokens/s and tokens."""
    random.seed(0)
    batch = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False) for length in lengths
    ]
    start = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    return sum(lengths) / (time.perf_counter() - start), sum(lengths)


def main() -> None:
    """Run everything, print as it comes, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="one repeat, short outputs")
    parser.add_argument("--run-ahead", default="auto")
    options = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(
        options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=256,
        enable_prefix_caching=False,
        dtype="bfloat16",
        run_ahead=options.run_ahead if options.run_ahead == "auto" else int(options.run_ahead),
    )
    gc.collect()
    gc.freeze()  # as the engine process does
    report: dict[str, Any] = {
        "model": Path(options.model).name,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "startup_s": time.perf_counter() - start,
    }

    def note(name: str, value: float) -> None:
        report[name] = value
        print(f"{name:28} {value:12.3f}", flush=True)

    note("startup_s", report["startup_s"])
    rng = random.Random(1)
    seconds(llm, prompts(rng, 8, 128), 16, temperature=0.0)
    note("first_generate_s", seconds(llm, prompts(rng, 1, 512), 1, temperature=0.0))
    note("ttft_ms_512_alone", min(seconds(llm, prompts(rng, 1, 512), 1, temperature=0.0) for _ in range(5)) * 1e3)
    repeats = 1 if options.quick else 2
    for rows in ROWS:
        note(f"itl_ms_greedy_bs{rows}", itl_ms(llm, rows, 64, 320 if options.quick else 576, repeats, temperature=0.0))
    for name, params in VARIANTS.items():
        note(f"itl_ms_{name}_bs64", itl_ms(llm, 64, 32, 288, repeats, **params))
    note("itl_ms_plain_bs64_short", itl_ms(llm, 64, 32, 288, repeats, temperature=0.0))
    note("prefill_tok_s", 64 * 1024 / min(seconds(llm, prompts(rng, 64, 1024), 1, temperature=0.0) for _ in range(3)))
    report["nano_tokens"] = nano(llm)[1]
    note("nano_tok_s", max(nano(llm)[0] for _ in range(repeats)))
    stats = llm.stats()
    report["stats"] = {name: getattr(stats, name) for name in stats.__struct_fields__}
    Path(options.out).write_text(json.dumps(report, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
