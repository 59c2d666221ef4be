"""Decode steps of long contexts beside the bytes that they read, for the shape of any config.json, with random weights.

    python bench/long_contexts.py [--model deepseek_v2_lite --model qwen3_4b] [--rows 128x8192 --rows 1x131072] [--cache fp8]

For each set of rows: milliseconds of a greedy step; the bytes of all weights and of the rows' contexts, from what the model
says it caches; the time these bytes take at the card's own bandwidth; and what the step takes over it. Of a mixture a
step reads the weights of the experts it goes to, so its weights are an upper bound. A row's last column is the time of the
contexts' bytes alone over the difference to a step of the same rows with contexts of 128 tokens: what attention by itself
makes of the bandwidth. Rows that do not fit into the card's memory are not run: some would wait for others, which is no step.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from headway import LLM
from headway.cli.bench.anchors.command import card_name, compared
from headway.cli.bench.anchors.context import find_model, step_ms
from headway.cli.bench.anchors.floors import bandwidth
from headway.models.load import describe, parameter_bytes
from headway.models.registry import read_config
from headway.state.cache_pool import bytes_per_block
from headway.weights import open_checkpoint

UTILISED = 0.9
"""Of the card's memory, as ``gpu_memory_utilization``."""
SHORT, STEPS = 128, (8, 264)
"""Tokens of the short contexts; output lengths whose difference is the steps that are timed."""


def sizes(folder: str, context: int, cached: torch.dtype) -> tuple[int, int]:
    """(bytes of all weights in bf16, bytes that the cache has of a token)."""
    config = open_checkpoint(folder, load_format="dummy").config | longest(context)
    layout = describe(config).cache
    return parameter_bytes(read_config(config), torch.bfloat16), bytes_per_block(layout, 1, cached) * len(layout.groups)


def longest(context: int) -> dict[str, Any]:
    """What a config.json must say for such contexts: shapes are measured beyond what their models were trained for."""
    return {"max_position_embeddings": context + STEPS[1] + 1}


def measure(folder: str, rows: int, context: int, cache: str, bytes_per_ms: float) -> None:
    """Print a line."""
    cached = torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16
    weights, token = sizes(folder, context, cached)
    read, room = rows * (context + STEPS[1]) * token, UTILISED * torch.cuda.mem_get_info()[1]
    if weights + read > room:
        needs = f"weights {weights / 1e9:.1f} GB and contexts {read / 1e9:.1f} GB do not fit into {room / 1e9:.1f} GB"
        print(f"{folder.rpartition('/')[2]:20} {rows:4} x {context:6} {cache:5} not run: {needs}", flush=True)
        return
    llm = LLM(
        folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, hf_overrides=longest(context),
        max_model_len=context + STEPS[1] + 1, max_num_seqs=rows, kv_cache_dtype=cache, enable_prefix_caching=False,
    )  # fmt: skip
    try:
        short = step_ms(llm, rows, SHORT, STEPS, [{}], 1, repeats=2)
        long = step_ms(llm, rows, context, STEPS, [{}], 1, repeats=2)
    finally:
        llm.close()
    read = rows * context * token
    floor = (weights + read) / bytes_per_ms
    attention = read / bytes_per_ms / max(long - short, 1e-9)
    print(
        f"{folder.rpartition('/')[2]:20} {rows:4} x {context:6} {cache:5} {long:8.2f} ms  short {short:7.2f} ms  "
        f"weights {weights / 1e9:6.1f} GB  contexts {read / 1e9:6.2f} GB  floor {floor:7.2f} ms  {long / floor:5.2f}x  "
        f"attention {100 * attention:4.0f} % of the bandwidth",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--rows", action="append", default=[])
    parser.add_argument("--cache", default="auto")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("long contexts are measured on a GPU")
    card = card_name("auto")
    speed = bandwidth(card)
    assert speed is not None, "a GPU's bandwidth is measured where it is not known"
    print(f"{card}: {compared(card).partition(';')[0]}", flush=True)
    for name in args.model or ["deepseek_v2_lite", "qwen3_4b"]:
        for each in args.rows or ["128x8192", "1x131072"]:
            rows, _, context = each.partition("x")
            measure(str(find_model(name)), int(rows), int(context), args.cache, speed / 1e3)


if __name__ == "__main__":
    main()
