"""The anchor workloads of generation on this machine's card: inter-token latency, the nano-vllm bench, prefill, first token.

    python bench/anchors.py --model bench/models/qwen3_06b --out FOLDER/NAME [--quick]

writes NAME.json and NAME.md. Dummy weights, prompts as token ids, no detokenising. ITL is the difference of two output lengths,
so that prefill cancels. Floors, the other engine's figures and goals are in bench/anchor_figures.json.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import random
import sys
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


def table(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per figure, beside its floor, anchor and goal where there are any."""
    known = json.loads(Path(__file__).with_name("anchor_figures.json").read_text()).get(report["model"], {})
    figures = {name: value for name, value in report.items() if isinstance(value, float)}
    return [{"name": name, "ours": value, **known.get(name, {})} for name, value in figures.items()]


def markdown(report: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"# {report['model']} on {report['card']}, {report['date']}",
        "",
        f"torch {report['torch']}, Python {report['python']}, commit {report['commit']}; `{report['command']}`",
        "",
        "| figure | unit | floor | ours | vLLM 0.26 | goal | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        goal, met = row.get("goal"), ""
        if goal is not None:
            met = "yes" if (row["ours"] <= goal) == (row["better"] == "lower") or row["ours"] == goal else "no"
        cells = [row.get("unit", ""), row.get("floor"), f"{row['ours']:.4g}", row.get("anchor"), goal, met]
        lines.append(f"| {row['name']} | " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything, print as it comes, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="one repeat, short outputs")
    parser.add_argument("--run-ahead", default="auto")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the report")
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
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "command": "python " + " ".join(sys.argv),
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
    llm.close()
    report["rows"] = table(report)
    Path(options.out + ".json").write_text(json.dumps(report, indent=1))
    Path(options.out + ".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
