"""MiniLM on the CPU: texts a second and one query's latency, beside the same weights in a peer, in the same run.

    python bench/cpu_embed.py [--words 8,32,128] [--texts 256] [--repeats 3] [--peer transformers|sentence-transformers]

Both make float32 vectors from texts, tokenising included, with all cores. The peer ``transformers`` does what the package
sentence-transformers does: texts sorted by length, batches of 32, padded, mean over the tokens, length 1. Best of the repeats,
made in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headway import LLM
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", default="8,32,128")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("transformers", "sentence-transformers"), default="transformers")
    given = parser.parse_args()
    folder = str(locate("minilm").path)
    peer = (plain_transformers if given.peer == "transformers" else sentence_transformers)(folder)
    with LLM("minilm", device="cpu", dtype="float32") as llm:
        ours: Callable[[list[str]], Any] = lambda texts: llm.embed(texts, as_numpy=True, use_tqdm=False)  # noqa: E731
        print(f"{cpu_name()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        print("| texts | Headway, texts/s | " + given.peer + " | | least cosine |\n|---|---|---|---|---|")
        for words in map(int, given.words.split(",")):
            texts, best, vectors = texts_of(words, given.texts), [float("inf")] * 2, [None, None]
            for _ in range(given.repeats):
                for i, run in enumerate((ours, peer)):
                    start = time.perf_counter()
                    vectors[i] = run(texts)
                    best[i] = min(best[i], time.perf_counter() - start)
            speeds = [len(texts) / seconds for seconds in best]
            cosine = float((np.asarray(vectors[0]) * np.asarray(vectors[1])).sum(1).min())
            print(
                f"| about {words} words | {speeds[0]:.0f} | {speeds[1]:.0f} | {speeds[0] / speeds[1]:.2f}x | {cosine:.7f} |"
            )
        query, times = ["When can I travel to Norway?"], [[], []]
        for _ in range(30):
            for i, run in enumerate((ours, peer)):
                start = time.perf_counter()
                run(query)
                times[i].append(time.perf_counter() - start)
        print(f"one query: {np.median(times[0]) * 1e3:.2f} ms, {given.peer} {np.median(times[1]) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
