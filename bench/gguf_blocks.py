"""Weights in their GGUF blocks beside dequantised ones and llama.cpp, on the CPU: tokens per second, memory, accuracy.

    python bench/gguf_blocks.py [--model smollm2] [--rows 1,16] [--tokens 64] [--repeats 3] [--llama PYTHON] [--accuracy]

Speed: all read the same file, decode greedily exactly ``--tokens`` tokens from the same prompts, and get all cores; best of the
repeats, prompt included. ``--llama`` names an interpreter with llama-cpp-python (see bench/llama_cpp_decode.py).
``--accuracy``: blocks against the same weights dequantised to float32, both by Headway: greedy tokens of several prompts, and
log-probabilities and perplexity of a text (CONTRIBUTING.md, or ``--text``).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from headway import LLM, SamplingParams
from headway.weights import open_checkpoint

HERE = Path(__file__).parent
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle. Number {}."
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "List three facts on the sea:\n1.",
    "Q: Why does bread rise? Answer with reasons.\nA:",
    "Once upon a time there was a lost key",
    "The first ten prime numbers are",
    "Dear neighbour, I am writing to you because",
    "Winter is",
]
FORMS: dict[str, dict[str, Any]] = {
    "blocks": {"quantization": "gguf"},
    "float32": {"quantization": "none", "dtype": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
}


def engine(model: str, form: str, **more: Any) -> LLM:
    """An engine whose prefix cache does not help."""
    return LLM(model, max_model_len=512, enable_prefix_caching=False, **FORMS[form], **more)


def speed(options: argparse.Namespace) -> None:
    """Print tokens per second of every form and number of rows."""
    clock = time.process_time if options.processor_time else time.perf_counter
    rows_list = [int(word) for word in options.rows.split(",")]
    theirs: dict[str, float] = {}
    if options.llama:
        threads = str(torch.get_num_threads())
        file = str(open_checkpoint(options.model).path)
        flags = ["--rows", options.rows, "--tokens", str(options.tokens), "--threads", threads]
        flags += ["--repeats", str(options.repeats), *["--processor-time"] * options.processor_time]
        command = [options.llama, str(HERE / "llama_cpp_decode.py"), file, *flags]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        theirs = found["tokens_per_second"]
        print(f"llama-cpp-python {found['llama_cpp_python']}: {theirs}", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    for form in options.forms.split(","):
        llm = engine(options.model, form)
        for rows in rows_list:
            prompts = [PROMPT.format(row) for row in range(rows)]
            best = 0.0
            for _ in range(options.repeats):
                start = clock()
                llm.generate(prompts, params, use_tqdm=False)
                best = max(best, rows * options.tokens / (clock() - start))
            ratio = f", {best / theirs[str(rows)]:.2f}x llama.cpp" if theirs else ""
            print(f"{form:9} {rows:3} rows: {best:8.1f} tok/s{ratio}", flush=True)
        llm.close()


def accuracy(options: argparse.Namespace) -> None:
    """Print how far blocks with 8-bit activations are from dequantised float32 weights."""
    text = (options.text or HERE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    greedy = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers, scores = {}, {}
    for form in ("float32", "blocks"):
        llm = engine(options.model, form)
        answers[form] = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        ids = llm.get_tokenizer().encode(text)
        windows = [{"prompt_token_ids": ids[at : at + 500]} for at in range(0, min(len(ids), 4000), 500)]
        outputs = llm.generate(windows, score, use_tqdm=False)
        scores[form] = [
            next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs or [] if entry
        ]
        llm.close()
    pairs = list(zip(answers["float32"], answers["blocks"], strict=True))
    same = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    whole = sum(count == options.tokens for count in same)
    print(f"greedy: {whole} of {len(same)} answers of {options.tokens} tokens are equal; equal at the start: {same}")
    for form, found in scores.items():
        print(f"perplexity, {form}: {math.exp(-sum(found) / len(found)):.4f} over {len(found)} tokens")
    apart = torch.tensor(scores["blocks"]) - torch.tensor(scores["float32"])
    print(
        f"log-probability of the text's tokens: mean difference {apart.mean():+.5f}, standard deviation {apart.std():.4f}"
    )


def main() -> None:
    """Speed, or accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forms", default="blocks,float32")
    parser.add_argument("--llama", help="an interpreter with llama-cpp-python")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--text", type=Path, help="what the perplexity is of")
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of the clock's: on busy machines, one thread"
    )
    options = parser.parse_args()
    (accuracy if options.accuracy else speed)(options)


if __name__ == "__main__":
    main()
