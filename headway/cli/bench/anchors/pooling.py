"""Vectors of texts: requests per second by their length, prompts as token ids."""

from __future__ import annotations

import random
import time
from typing import Final

from headway.cli.bench.anchors.context import Bench, longest_context, random_prompts
from headway.core.errors import ConfigError

LENGTHS: Final = (32, 128, 512)
SPECIAL: Final = 2
"""Positions that a model which can run no more than the longest length keeps for its special tokens."""


def rate_name(length: int) -> str:
    """Requests per second of texts of ``length`` tokens."""
    return f"req_s_len{length}"


def lengths(bench: Bench) -> list[int]:
    """The measured ones: an encoder with 512 positions gets texts of 510."""
    longest = longest_context(bench.folder, bench.scale) - SPECIAL
    return [min(length, longest) for length in LENGTHS]


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    names = [rate_name(length) for length in lengths(bench)]
    bench.table.announce(names, "req/s", "higher")
    return names


def measure(bench: Bench) -> None:
    """Measure what is wanted, with one engine.

    Raises:
        ConfigError: the model gives no vectors.
    """
    names = announce(bench)
    if not bench.table.wants(*names):
        return
    with bench.open() as llm:
        task = llm.model_info.tasks[0]
        if not task.pools:
            raise ConfigError(f"{bench.table.model} generates; vectors are measured of models that pool")
        rng = random.Random(3)
        for length in lengths(bench):
            name = rate_name(length)
            if not bench.table.wants(name):
                continue
            with bench.table.measuring([name]):
                count = bench.scale.texts if length <= LENGTHS[1] else bench.scale.texts // 4
                prompts = random_prompts(rng, count, length, llm.model_info.vocab_size)
                llm.encode(list(prompts[: count // 8 or 1]), pooling_task=task, use_tqdm=False)
                for _ in range(bench.runs):
                    start = time.perf_counter()
                    llm.encode(list(prompts), pooling_task=task, use_tqdm=False)
                    bench.table.add(name, count / (time.perf_counter() - start))
