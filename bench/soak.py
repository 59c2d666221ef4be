"""Minutes of random requests on one engine: all features, aborts, mixed lengths, memory short enough to preempt.

    python bench/soak.py --seconds 600 --json OUT            a tiny float32 model, on the GPU if there is one
    python bench/soak.py --seconds 280 --seed 1 --json OUT --model headway/cli/bench/anchors/models/qwen3_06b --dtype bfloat16

On CUDA every launch runs under ``syncs.forbid()`` and torch's sync detector in error mode: one wait ends the run. A sample
of the finished requests is asked for again, each alone: of an engine of depth 0, and of one that runs ahead. Those two must
give the same tokens in every dtype, since the batches are the same: depth changes nothing. What the request got in the crowd
must be the same too (ties in the last bit apart) with the tiny float32 model, where the engine of depth 0 has no drafts even
if --speculative-config gives the others some; with another model or in bfloat16, where last
bits depend on the batch (the shapes of products, the splits of attention), the agreement is only reported. At the end every
slot, block, staged edit, thread and (up to the allocator's rounding) byte must be back. OUT is rewritten with every progress
line and when the run is ended from outside, then with ``over`` and ``ok`` false. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, run
from tests.engine.test_fuzz import random_request
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import VOCAB, save_tiny_llama
from tests.gpu.guard import no_waits
from tests.sim.rounding import settle

PROGRESS_SECONDS = 10.0
STUCK_SECONDS = 120
MAX_MODEL_LEN = 256
SLACK_BYTES = 16 * 2**20
"""Device memory that may still be held at the end."""
LARGE_BYTES = 2**20


@dataclass
class Tally:
    """What happened so far."""

    seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0
    back_pressure_waits: int = 0
    run_ahead: int = 0
    checked: int = 0
    agreed: int = 0
    agreed_alone: int = 0
    errors: int = 0
    guarded_launches: int = 0
    device_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    """The loop.

    Args:
        core: the engine under load.
        oracle: an engine of depth 0 with the same weights.
        alone: one that runs ahead, with the same weights, for one request at a time.
        exact: a sampled request that gives other tokens in the crowd is an error.
        every: one request in so many is checked.
    """

    def __init__(
        self, core: EngineCore, oracle: EngineCore, alone: EngineCore, seed: int, exact: bool, every: int
    ) -> None:
        self.core, self.oracle, self.alone, self.exact, self.every = core, oracle, alone, exact, every
        self.rng, self.tally = random.Random(seed), Tally()
        self.open: dict[str, AddRequest] = {}
        self.answers: dict[str, Answer] = {}
        self._wanted = 1

    def add(self) -> None:
        """Keep about as many requests open as is wanted at the moment; what is wanted comes in bursts."""
        if self.rng.random() < 0.02:
            self._wanted = self.rng.choice([1, 2, 8, 16, 40])
        for _ in range(min(self._wanted - len(self.open), self.rng.choice([0, 1, 4]))):
            request: AddRequest = random_request(self.rng, self.tally.requests)
            room = MAX_MODEL_LEN - len(request.prompt_token_ids)
            longest = self.rng.choice([1, 5, 14, 60, 140])
            request.params.max_tokens = min(max(longest, request.params.min_tokens, 1), room)
            self.tally.requests += 1
            self.open[request.request_id], self.answers[request.request_id] = request, Answer()
            self.core.add(request)

    def turn(self) -> None:
        """Abort sometimes, step once, look at what came."""
        if self.open and self.rng.random() < 0.01:
            victim = self.rng.choice(list(self.open))
            self.core.abort(victim)
            self.tally.aborted += 1
            del self.open[victim], self.answers[victim]
        for update in self.core.step():
            answer = self.answers[update.request_id]  # KeyError: an update after the end or the abort
            answer.take(update)
            self.tally.tokens += len(update.new_token_ids)
            if update.finish_reason is not None:
                self._finished(self.open.pop(update.request_id), self.answers.pop(update.request_id))

    def _finished(self, request: AddRequest, answer: Answer) -> None:
        self.tally.finished += 1
        if answer.error is not None:
            self._check_error(request, answer.error)
        elif self.tally.finished % self.every == 0:
            self._check(request, answer)

    def _check_error(self, request: AddRequest, error: str) -> None:
        """Random demands may leave no token to draw; a request alone at depth 0 must then end by the same error."""
        truth = run(self.oracle, [request])[request.request_id]
        self.tally.errors += 1
        if truth.error != error:
            self.tally.wrong.append(f"request {request.request_id}: {error}; at depth 0: {truth.error}"[:300])

    def _check(self, request: AddRequest, answer: Answer) -> None:
        def ask(each: AddRequest) -> Answer:
            return run(self.oracle, [each])[each.request_id]

        truth, ahead = ask(request), run(self.alone, [request])[request.request_id]
        self.tally.checked += 1
        self.tally.agreed += truth.token_ids == answer.token_ids
        self.tally.agreed_alone += truth.token_ids == ahead.token_ids
        if self.exact and self.core.stats().num_accepted_tokens_per_pos:
            self._settle(ahead, truth, request, ask, "alone, with drafts,")
        elif truth.token_ids != ahead.token_ids:
            tokens = f"{truth.token_ids} at depth 0, {ahead.token_ids} ahead"
            self.tally.wrong.append(f"request {request.request_id} alone: {tokens}"[:300])
        if self.exact:
            self._settle(answer, truth, request, ask, "in the crowd")

    def _settle(
        self, answer: Answer, truth: Answer, request: AddRequest, ask: Callable[[AddRequest], Answer], where: str
    ) -> None:
        try:
            settle(answer, truth, request, ask)
        except AssertionError as error:
            self.tally.wrong.append(f"request {request.request_id} {where} differs from depth 0: {error}"[:300])

    def refresh(self, since: float, launches: list[int]) -> Tally:
        """The tally with the engine's own counters."""
        stats, tally = self.core.stats(), self.tally
        tally.seconds = round(time.monotonic() - since, 1)
        tally.steps, tally.preemptions = stats.num_steps, stats.num_preemptions
        tally.prefix_hits, tally.back_pressure_waits = stats.prefix_cache_hits, stats.back_pressure_waits
        tally.drafted, tally.accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        tally.run_ahead, tally.guarded_launches = stats.run_ahead, launches[0]
        tally.device_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return tally


def engine(model: str, device: str, dtype: str, **overrides: Any) -> EngineCore:
    """An engine of the soak's sizes."""
    args: dict[str, Any] = {
        "model": model,
        "load_format": "auto" if (Path(model) / "model.safetensors").exists() else "dummy",
        "device": device,
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 16,
    }
    core = build_engine(EngineArgs(**(args | overrides)), progress=False)
    core.learn(VOCABULARY)
    return core


def claim(core: EngineCore) -> None:
    """Let an engine take what a first use allocates, which is not growth: cuBLAS keeps 32 MiB for each stream that it works on.

    Log-probabilities of a long prompt go through its products in an eager step, whatever our own kernels serve.
    """
    first = random_request(random.Random(1), 0)
    first.prompt_token_ids = [i % 97 for i in range(MAX_MODEL_LEN - 8)]
    first.params.max_tokens, first.params.prompt_logprobs = 2, 1
    run(core, [first])


def large_blocks() -> Counter[int]:
    """Sizes of the large pieces of device memory in use."""
    if not torch.cuda.is_available():
        return Counter()
    blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
    return Counter(
        block["size"] for block in blocks if block["state"] == "active_allocated" and block["size"] >= LARGE_BYTES
    )


def kv_bytes(model: str, dtype: str, kv_cache_dtype: str, blocks: int) -> int:
    """Bytes of so many KV blocks of 16 tokens."""
    each = 1 if kv_cache_dtype != "auto" else 4 if dtype == "float32" else 2
    config = json.loads((Path(model) / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    return blocks * 16 * 2 * config["num_hidden_layers"] * heads * size * each


def play(soak: Soak, seconds: float, least: int, launches: list[int], save: Any) -> None:
    """Random requests for so long, and until ``least`` have ended; then let the open ones end."""
    since = shown = time.monotonic()
    while (now := time.monotonic()) - since < seconds or soak.tally.finished < least or soak.core.has_work():
        if now - since < seconds or soak.tally.finished < least:
            soak.add()
        soak.turn()
        if now - shown >= PROGRESS_SECONDS:
            shown = now
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            tally = soak.refresh(since, launches)
            save(tally, False)
            print(
                f"{tally.seconds:7.0f} s  {tally.finished} finished, {tally.aborted} aborted, {tally.tokens} tokens, "
                f"{tally.steps} steps, {tally.preemptions} preemptions, {tally.checked} checked, "
                f"{tally.agreed_alone} equal alone, {tally.agreed} in the crowd, "
                f"{len(tally.wrong)} wrong",
                flush=True,
            )
        if len(soak.tally.wrong) > 20:
            break
    soak.refresh(since, launches)


def closing_checks(soak: Soak, threads: int, device_bytes: int, blocks: Counter[int]) -> None:
    """Everything is back."""
    wrong, core = soak.tally.wrong, soak.core
    stats = core.stats()
    if (stats.num_running, stats.num_waiting, stats.kv_cache_usage) != (0, 0, 0.0):
        wrong.append(f"not idle at the end: {stats.num_running} running, {stats.num_waiting} waiting")
    for name, each in (("engine", core), ("oracle", soak.oracle), ("engine of one request", soak.alone)):
        try:
            each.check_integrity()
        except Exception as error:
            wrong.append(f"{name}: {error}")
    if threading.active_count() > threads:
        wrong.append(f"{threading.active_count() - threads} threads were left behind")
    gc.collect()
    if torch.cuda.is_available():
        grown = torch.cuda.memory_allocated() - device_bytes
        new = ", ".join(f"{count} of {size}" for size, count in sorted((large_blocks() - blocks).items()))
        print(f"{grown} bytes of device memory more than at the start; new pieces: {new or 'none'}", flush=True)
        if grown > SLACK_BYTES:
            wrong.append(f"{grown} bytes of device memory more than at the start: {new}")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="then the open requests end")
    parser.add_argument("--requests", type=int, default=0, help="that many must have ended, however long it takes")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", help="a folder with config.json; dummy weights; default: a tiny Llama")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run-ahead", default="auto")
    parser.add_argument("--speculative-config", type=json.loads, help='drafts, as JSON: {"method": "ngram", ...}')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="check one finished request in so many against depth 0")
    given = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cuda = given.device.startswith("cuda")
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
        stack.callback(signal.signal, signal.SIGTERM, before)
        model = given.model
        if model is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            save_tiny_llama(folder)
            model = str(folder)
        ahead = given.run_ahead if given.run_ahead == "auto" else int(given.run_ahead)
        pool = kv_bytes(
            model, given.dtype, given.kv_cache_dtype, 60
        )  # 16 rows of up to 16 blocks: preemptions are certain
        made = functools.partial(engine, model, given.device, given.dtype, kv_cache_memory_bytes=pool)
        made = functools.partial(made, kv_cache_dtype=given.kv_cache_dtype)
        exact = given.model is None and given.dtype == "float32" and given.kv_cache_dtype == "auto"
        drafts = given.speculative_config
        core = made(run_ahead=ahead, speculative_config=drafts)
        oracle = made(run_ahead=0, enable_prefix_caching=False, speculative_config=None if exact else drafts)
        alone = made(run_ahead=ahead, enable_prefix_caching=False, speculative_config=drafts)
        for each in (core, oracle, alone):
            claim(each)
        soak = Soak(core, oracle, alone, given.seed, exact, given.every)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        launches = stack.enter_context(no_waits(patch)) if on_cuda else [0]
        threads, blocks = threading.active_count(), large_blocks()
        device_bytes = torch.cuda.memory_allocated() if on_cuda else 0
        about = {
            "model": given.model or f"tiny Llama, {VOCAB} tokens",
            "dtype": given.dtype,
            "kv_cache_dtype": given.kv_cache_dtype,
            "speculative_config": drafts,
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "guard": "armed in error mode" if on_cuda else "none: no CUDA",
            "torch": torch.__version__,
            "seed": given.seed,
        }

        def save(tally: Tally, over: bool) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            result = about | {"over": over, "ok": over and not tally.wrong, "host_peak_mib": peak} | asdict(tally)
            beside = given.json.with_suffix(".part")
            beside.write_text(json.dumps(result, indent=1) + "\n")
            beside.replace(given.json)  # whole at any moment

        over = False
        try:
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            play(soak, given.seconds, given.requests, launches, save)
            closing_checks(soak, threads, device_bytes, blocks)
            over = True
        except Exception as error:  # a guard that bit, an update that should not be: the figures so far are kept
            soak.tally.wrong.append(f"{type(error).__name__}: {error}"[:1000])
            over = True
        finally:
            faulthandler.cancel_dump_traceback_later()
            save(soak.tally, over)
    print(json.dumps(asdict(soak.tally), indent=1))
    return int(bool(soak.tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
