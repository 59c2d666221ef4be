"""Where the microseconds of models that pool go on a card: kernel by kernel, beside the unprofiled time of the same texts.

    python -m bench.profile_texts --model headway/cli/bench/anchors/models/bert_base [--lengths 32,128,510] [--texts 2048]

Prompts are random token ids. GPU busy is kernel time (profiled) over the unprofiled time: the profiler slows the host.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.profile_decode import covered
from headway import LLM
from headway.cli.bench.anchors.context import random_prompts

GAPS = (5.0, 50.0, 500.0, float("inf"))


def gaps_between(events: Iterable[Any]) -> dict[float, float]:
    """Microseconds in which nothing ran on the device, by how long it went on."""
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in events if e.device_type == torch.autograd.DeviceType.CUDA
    )
    found, reached = dict.fromkeys(GAPS, 0.0), spans[0][0] if spans else 0.0
    for start, end in spans:
        gap = max(0.0, start - reached)
        found[next(most for most in GAPS if gap <= most)] += gap
        reached = max(reached, end)
    return found


def main() -> None:
    """Print one table per length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="32,128,510")
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    options = parser.parse_args()
    made = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
    with LLM(options.model, max_num_batched_tokens=options.max_num_batched_tokens, **made) as llm:
        task, random_ids = llm.model_info.tasks[0], random.Random(3)
        for length in (int(word) for word in options.lengths.split(",")):
            prompts = random_prompts(random_ids, options.texts, length, llm.model_info.vocab_size)
            llm.encode(prompts, pooling_task=task, use_tqdm=False)
            begin = time.perf_counter()
            llm.encode(prompts, pooling_task=task, use_tqdm=False)
            whole_us = (time.perf_counter() - begin) * 1e6
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                llm.encode(prompts, pooling_task=task, use_tqdm=False)
                torch.cuda.synchronize()
            totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for event in trace.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    totals[event.name][0] += event.device_time_total
                    totals[event.name][1] += 1
            busy_us = covered(trace.events())
            gaps = gaps_between(trace.events())
            print(
                f"\n{length} tokens: {options.texts / whole_us * 1e6:,.0f} texts/s, {whole_us:,.0f} us, "
                f"kernels {busy_us:,.0f} us, busy {busy_us / whole_us:.1%}; idle under the profiler, by the length of the gap: "
                + ", ".join(f"up to {most} us {total:,.0f} us" for most, total in gaps.items())
            )
            for name, (time_us, number) in sorted(totals.items(), key=lambda item: -item[1][0])[: options.top]:
                print(f"  {time_us / busy_us:6.1%} {number:7.0f} x {time_us / number:8.2f} us  {name[:100]}")


if __name__ == "__main__":
    main()
