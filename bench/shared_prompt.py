"""First tokens of many users who share one system prompt, with prefix caching and without, for models with states and without.

    python -m bench.shared_prompt [--model gdn_08b --model qwen3_06b] [--users 50] [--shared 2000] [--own 50] [--every 0]

Weights are dummies. Three ways, each several times with other prompts, of which the report has the medians:

- ``off``: prefix caching is off.
- ``new``: it is on, and nobody has asked behind this system prompt before.
- ``known``: it is on, and users have asked before: one leaves keys and values; a model with states needs a second one, who
  leaves a checkpoint of the states where the two part.

All users come at once, or one ``--every`` so many milliseconds; a first token's time counts from when its user was due. Writes
JSON and Markdown under ``--out``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headway.cli.bench.anchors.command import card_name, git_commit
from headway.cli.bench.anchors.context import engine_of, find_model, free_memory, plain, random_prompts
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

WAYS = ("off", "new", "known")
TOKENS = 16
"""Of each answer."""
EARLIER = 2
"""Users who asked before, where the system prompt is known."""
FIGURES = (
    "first_token_ms_p50",
    "first_token_ms_p99",
    "all_first_tokens_ms",
    "all_answers_ms",
    "tokens_hit_pct",
    "steps",
)


def requests(name: str, prompts: Sequence[list[int]]) -> list[AddRequest]:
    """Greedy ones of exactly ``TOKENS`` tokens."""
    return [
        AddRequest(
            request_id=f"{name}-{n}", prompt_token_ids=prompt, params=plain(TOKENS), seed=n, eos_token_ids=[]
        )
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip


def serve(core: EngineCore, waiting: Sequence[AddRequest], every: float = 0.0) -> dict[str, list[float]]:
    """Seconds from the first arrival to each request's arrival, first token and end; one arrives every so many seconds."""
    due = [n * every for n in range(len(waiting))]
    times = {each.request_id: [at] for each, at in zip(waiting, due, strict=True)}
    begun, sent = time.perf_counter(), 0
    while sent < len(waiting) or core.has_work():
        while sent < len(waiting) and time.perf_counter() - begun >= due[sent]:
            core.add(waiting[sent])
            sent += 1
        for update in core.step():
            now = time.perf_counter() - begun
            if update.error is not None:
                raise RuntimeError(f"request {update.request_id} failed: {update.error}")
            own = times[update.request_id]
            if update.new_token_ids and len(own) == 1:
                own.append(now)
            if update.finish_reason is not None:
                own.append(now)
    return times


def figures(times: dict[str, list[float]], hit: int, shared: int) -> dict[str, float]:
    """What one run of all users gives; ``hit``: tokens that were found, of all users together."""
    firsts = [1e3 * (first - due) for due, first, _ in times.values()]
    return {
        "first_token_ms_p50": float(np.quantile(firsts, 0.5)),
        "first_token_ms_p99": float(np.quantile(firsts, 0.99)),
        "all_first_tokens_ms": 1e3 * max(first for _, first, _ in times.values()),
        "all_answers_ms": 1e3 * max(end for _, _, end in times.values()),
        "tokens_hit_pct": 100 * hit / (shared * len(times)),
    }


def measure(core: EngineCore, way: str, asked: argparse.Namespace) -> dict[str, float]:
    """Medians over the runs."""
    rng, runs = random.Random(len(way)), []
    vocab, every = core.info.vocab_size, asked.every / 1e3
    for run in range(asked.runs + 1):
        [stem] = random_prompts(rng, 1, asked.shared, vocab)
        prompts = [stem + own for own in random_prompts(rng, asked.users + EARLIER, asked.own, vocab)]
        if way == "known":
            for n in range(EARLIER):
                serve(core, requests(f"{run}-earlier{n}", prompts[asked.users + n :][:1]))
        before = core.stats()
        times = serve(core, requests(f"{run}", prompts[: asked.users]), every)
        after = core.stats()
        if run:  # the first loads kernels
            found = figures(times, after.prefix_cache_hits - before.prefix_cache_hits, asked.shared)
            runs.append(found | {"steps": after.num_steps - before.num_steps})
    return {name: median(each[name] for each in runs) for name in FIGURES}


def ways_of(name: str, asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Way -> figures, for one shape; two engines, one after the other."""
    folder = find_model(name)
    found = {}
    for ways in (WAYS[:1], WAYS[1:]):
        given: dict[str, Any] = {
            "model": str(folder), "load_format": "dummy", "dtype": "auto" if asked.device != "cpu" else "float32",
            "skip_tokenizer_init": True, "max_model_len": asked.shared + asked.own + TOKENS, "device": asked.device,
            "enable_prefix_caching": "off" not in ways, "max_num_seqs": max(asked.users, EARLIER),
        } | ({"kv_cache_memory_bytes": asked.cache_bytes} if asked.cache_bytes else {})  # fmt: skip
        core = build_engine(EngineArgs(**given | engine_of(folder)), progress=False)
        try:
            for way in ways:
                found[way] = measure(core, way, asked)
        finally:
            core.shutdown()
            del core
            free_memory()
    return found


def markdown(report: dict[str, Any]) -> str:
    """A report for people."""
    sizes = report["sizes"]
    lines = [
        f"# {sizes['users']} users on one system prompt of {sizes['shared']} tokens, on {report['card']}, {report['date']}",
        "",
        f"commit {report['commit']}; {sizes['own']} tokens of their own each, one every {sizes['every']:g} ms (0: all at "
        f"once), answers of {TOKENS} tokens; medians of {sizes['runs']} runs",
        "",
        "| shape | prefix caching | first token p50, ms | p99 | last first token | last answer | shared hit, % | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, ways in report["models"].items():
        for way, found in ways.items():
            lines.append(f"| {model} | {way} | " + " | ".join(f"{found[name]:.1f}" for name in FIGURES) + " |")
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], folder: Path) -> Path:
    """Write both files; gives the JSON's path."""
    card = "".join(c if c.isalnum() else "-" for c in report["card"].lower().removeprefix("nvidia ")).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['date'][:16].replace(':', '').replace('T', '-')}-{card}-shared-prompt.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return path


def main(words: Sequence[str] | None = None) -> Path:
    """See the module; gives the JSON's path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="known shape, or folder with a config.json")
    for name, default in (("users", 50), ("shared", 2000), ("own", 50), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=float, default=0.0, help="milliseconds from one user to the next")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--cache-bytes", type=int, default=0, help="of keys, values and states; 0: what the card has left"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/reports"))
    asked = parser.parse_args(words)
    sizes = {name: getattr(asked, name) for name in ("users", "shared", "own", "runs", "every")}
    card = card_name(asked.device)
    models = {find_model(name).name: ways_of(name, asked) for name in asked.model or ["gdn_08b", "qwen3_06b"]}
    report = {
        "kind": "headway shared prompt", "card": card, "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "sizes": sizes, "models": models,
    }  # fmt: skip
    path = write(report, asked.out)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    return path


if __name__ == "__main__":
    main()
