"""MiniLM on the CPU: texts a second and one query's latency, beside the same weights in a peer, in the same run.

    python bench/cpu_embed.py [--words 8,32,128] [--texts 256] [--repeats 3] [--peer transformers|sentence-transformers]

Both make float32 vectors from texts, tokenising included, with all cores. The peer ``transformers`` does what the package
sentence-transformers does: texts sorted by length, batches of 32, padded, mean over the tokens, length 1. Each side runs in
processes of its own, in turn, and the best run counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headway.kernels.cpu.instructions import cpu_name
from headway.weights.source import locate

WORDS = (
    "train",
    "Oslo",
    "leaves",
    "nine",
    "bread",
    "flour",
    "water",
    "patience",
    "cats",
    "sleep",
    "why",
    "the",
    "a",
    "of",
    "at",
)
BATCH = 32


def texts_of(words: int, count: int) -> list[str]:
    """Random texts of ``words`` words, and up to a quarter more or less."""
    random = np.random.default_rng(words)
    sizes = random.integers(words * 3 // 4, words * 5 // 4 + 1, count)
    return [" ".join(random.choice(WORDS, size)) for size in sizes]


def plain_transformers(folder: str) -> Callable[[list[str]], Any]:
    """What sentence-transformers does, without it."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray[Any, Any]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = torch.empty(len(texts), model.config.hidden_size)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            found[chosen] = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return found.numpy()

    return encode


def sentence_transformers(folder: str) -> Callable[[list[str]], Any]:
    """The package itself."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH)


def measure(side: str, words: list[int], count: int) -> dict[str, float]:
    """Texts a second by words, and milliseconds of one query, of one side alone in this process."""
    folder = str(locate("minilm").path)
    if side == "headway":
        from headway import LLM  # here, so that a peer's process keeps its own settings

        llm = LLM("minilm", device="cpu", dtype="float32")
        run: Callable[[list[str]], Any] = lambda texts: llm.embed(texts, as_numpy=True, use_tqdm=False)  # noqa: E731
    else:
        run = plain_transformers(folder) if side == "transformers" else sentence_transformers(folder)
    found: dict[str, float] = {}
    for length in words:
        texts, best = texts_of(length, count), float("inf")
        for _ in range(3):
            start = time.perf_counter()
            run(texts)
            best = min(best, time.perf_counter() - start)
        found[f"texts of about {length} words, texts/s"] = count / best
    times = []
    for _ in range(30):
        start = time.perf_counter()
        run(["When can I travel to Norway?"])
        times.append(time.perf_counter() - start)
    found["one query, ms"] = float(np.median(times)) * 1e3
    return found


def in_a_process(side: str, arguments: list[str]) -> dict[str, float]:
    """``measure`` in a process of its own, whose OpenMP is as its side has it."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    if side == "headway":  # as the package sets it where it comes before torch
        environment["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(
        [sys.executable, __file__, "--side", side, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", default="8,32,128")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer", choices=("transformers", "sentence-transformers"), default="transformers")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.side, [int(each) for each in given.words.split(",")], given.texts)))
        return
    arguments = ["--words", given.words, "--texts", str(given.texts)]
    sides = ("headway", given.peer)
    runs = [[in_a_process(side, arguments) for side in sides] for _ in range(given.repeats)]
    print(f"{cpu_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"| | Headway | {given.peer} | |\n|---|---|---|---|")
    for name in runs[0][0]:
        choose = min if name.endswith("ms") else max
        ours, theirs = (choose(run[i][name] for run in runs) for i in range(2))
        factor = theirs / ours if name.endswith("ms") else ours / theirs
        print(f"| {name} | {ours:.4g} | {theirs:.4g} | {factor:.2f}x |")


if __name__ == "__main__":
    main()
