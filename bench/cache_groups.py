"""KV memory that one request takes beside layers with a sliding window, in cache groups and in one group for all.

    python -m bench.cache_groups [--tokens 32768] [--step-tokens 8192]

Needs no device: the scheduler deals the blocks out, the memory follows from the shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from headway.core.cache import CacheLayout, CacheSpec, keys_and_values
from headway.core.config import SchedulerConfig
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import StepResult
from headway.scheduler import Scheduler

BLOCK = 16
SHAPES = {
    "gemma3-27b": (62, 6, 1024, 16, 128),
    "gemma3-12b": (48, 6, 1024, 8, 256),
    "gemma3-4b": (34, 6, 1024, 4, 256),
    "gemma3-1b": (26, 6, 512, 1, 256),
    "gemma2-9b": (42, 2, 4096, 8, 256),
}
"""Layers, of which every n-th keeps all tokens; window, KV heads, size of a head."""


def layers(name: str, windows: bool) -> list[CacheSpec]:
    number, every, window, heads, size = SHAPES[name]
    return [keys_and_values(heads, size, window if windows and (i + 1) % every else 0) for i in range(number)]


def held(layout: CacheLayout, tokens: int, step_tokens: int) -> tuple[int, int]:
    """Most blocks that one request of ``tokens`` held, and those it holds at its end."""
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=step_tokens, max_model_len=tokens, block_size=BLOCK,
        num_blocks=len(layout.groups) * (tokens // BLOCK + 2), groups=layout.groups,
    )  # fmt: skip
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)
    prompt = [1] * (tokens - 100)
    scheduler.add(AddRequest(request_id="a", prompt_token_ids=prompt, params=params, seed=0, eos_token_ids=[]))
    counts: list[int] = []
    for generated in range(200):
        plan = scheduler.schedule()
        if plan is None:
            break
        counts.append(round(scheduler.stats().kv_cache_usage * (config.num_blocks - 1)))
        sampled = plan.samples.astype(np.int32)
        last = int(plan.starts_bound[0] + plan.query_lens[0]) == tokens - 1 and bool(sampled[0])
        finish = np.array([3 if last else 0], np.int32)
        scheduler.apply(plan, StepResult(sampled, np.ones((1, 1), np.int32), finish))
        assert generated < 199
    return max(counts), counts[-2]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--step-tokens", type=int, default=8192)
    options = parser.parse_args(argv)
    print("| shape | one group, GiB | groups | in groups, at its end, GiB | at most, GiB |\n|---|---|---|---|---|")
    for name in SHAPES:
        figures = []
        for windows in (False, True):
            layout = CacheLayout.of(layers(name, windows), options.tokens)
            place = max(len(group.layers) for group in layout.groups)
            spec = layout.layers[0]
            assert spec is not None
            block_bytes = place * BLOCK * sum(2 * part.elements for part in spec.parts)
            most, end = held(layout, options.tokens, options.step_tokens)
            figures.append((most * block_bytes / 2**30, end * block_bytes / 2**30, len(layout.groups)))
        (one, _, _), (most_bytes, end_bytes, groups) = figures
        print(f"| {name} | {one:.2f} | {groups} | {end_bytes:.2f} ({end_bytes / one:.0%}) | {most_bytes:.2f} |")


if __name__ == "__main__":
    main()
