"""Random scenarios of two ranks over a network that dawdles: ``python -m tests.parallel.scenarios FIRST-LAST`` plays them.

A seed draws requests, when they come, which are taken back, and how long messages take: collectives between ranks begin late,
launches reach the follower late, letters between replicas come late, out of order and twice. Ten neighbouring seeds share an
engine, which the first one draws: parts, stages, replicas that share experts, with micro-batches or without, drafts, the
run-ahead depth, the device, graphs or not, room for few requests or many. Whatever they draw, tokens are those of one rank at
depth 0, and all waits are counted: of each rank for its device, and of replicas for each other.

A delay is as real as the threads are, so a seed does not fix the interleaving: play one that failed several times.
"""

from __future__ import annotations

import faulthandler
import functools
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, RequestUpdate, StepUpdates
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.ranks import ThreadPost
from headway.engine.replicas import ReplicaClient
from headway.parallel.box import LetterBox
from headway.parallel.dp import Letter
from headway.parallel.group import TorchTransport
from tests.engine.harness import Answer, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import CONFIG, KV_BLOCK_BYTES, save_tiny_llama
from tests.parallel.families import write
from tests.parallel.test_engine import HALVES, THREADS, in_threads
from tests.parallel.waits import watched

SHARE = 10
"""Seeds to an engine: its start takes as long as some scenarios."""
HANG_SECONDS = 600.0
"""No engine's scenarios take so long together."""
SECONDS = 0.002
"""A message may be late by so much: longer than a step of a tiny model."""
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 3, "mlp_only_layers": [1],
}  # fmt: skip
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
REPLICAS = {"data_parallel_size": 2, "enable_expert_parallel": True}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", TENSOR),
    ("llama", STAGES),
    ("mixture", REPLICAS),
    ("llama", TENSOR | HALVES),
    ("mixture", TENSOR | HALVES | {"enable_expert_parallel": True}),
    ("llama", STAGES | HALVES),
    ("mixture", REPLICAS | HALVES),
    ("mixture", TENSOR | STAGES | HALVES),
)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@functools.cache
def folder(name: str) -> Path:
    """A model, for as long as the process lives."""
    found = Path(_keep(tempfile.TemporaryDirectory(prefix="headway-scenarios-")).name)
    if name == "llama":
        save_tiny_llama(found)
    else:
        write(CONFIG | EXPERTS, found)
    return found


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _keep(made: tempfile.TemporaryDirectory[str]) -> tempfile.TemporaryDirectory[str]:
    _KEPT.append(made)
    return made


@functools.cache
def pool(name: str) -> tuple[list[AddRequest], dict[str, Answer]]:
    """Requests to draw from, all features three times, and one rank's answers at depth 0."""
    made = requests_for([dict(each) for each in FEATURES.values()] * 3, seed=7)
    core = build_engine(arguments(name, {"enable_prefix_caching": False, "max_num_seqs": 16}), progress=False)
    core.learn(VOCABULARY)
    answers = run(core, made)
    core.shutdown()
    return made, answers


def arguments(name: str, more: dict[str, Any]) -> EngineArgs:
    sizes: dict[str, Any] = {
        "model": str(folder(name)), "dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 40, "block_size": 8, "run_ahead": 0, "kv_cache_memory_bytes": 2**21,
    }  # fmt: skip
    return EngineArgs(**sizes | more)


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """Model and arguments of the engine that ``seed`` runs on."""
    rng = random.Random(seed // SHARE)
    name, more = KINDS[seed // SHARE % len(KINDS)]
    more = dict(more) | THREADS | {"run_ahead": rng.choice((0, 1, 2, 4))}
    if rng.random() < 0.6:
        more |= {"device": f"sim:{seed // SHARE}"}
        more |= {} if rng.random() < 0.5 else {"enforce_eager": True}
    halved_replicas = "data_parallel_size" in more and "enable_dbo" in more
    if not halved_replicas and rng.random() < 0.3:
        more |= {"speculative_config": DRAFTS}
    width = 4 if "speculative_config" in more else 1
    more |= {"max_num_seqs": rng.choice((2, 4, 8)), "max_num_batched_tokens": rng.choice((8 * width, 40, 64))}
    if rng.random() < 0.3:
        layers = -(-(3 if name == "mixture" else 2) // more.get("pipeline_parallel_size", 1))
        block = layers * KV_BLOCK_BYTES // 2 // more.get("tensor_parallel_size", 1)
        more |= {"kv_cache_memory_bytes": 18 * block}  # hardly more than the longest request may want
    return name, more


class Weather:
    """Delays of a seed."""

    def __init__(self) -> None:
        self.rng = random.Random()
        self._held: dict[int, list[Letter]] = {}

    def dawdle(self, often: float) -> None:
        """Now and then."""
        if self.rng.random() < often:
            time.sleep(self.rng.random() * SECONDS)

    @contextmanager
    def over(self) -> Iterator[None]:
        """All ranks of this process."""
        do, take, letters, wait = TorchTransport._do, ThreadPost.receive, LetterBox.receive, LetterBox.wait

        def late(transport: TorchTransport, begin: Any) -> None:
            self.dawdle(0.03)
            do(transport, begin)

        def launch(post: ThreadPost, seconds: float) -> tuple[int, bytes] | None:
            self.dawdle(0.1)
            return take(post, seconds)

        def receive(box: LetterBox) -> list[Letter]:
            held = self._held.setdefault(id(box), [])
            held += letters(box)
            self.rng.shuffle(held)
            given = held[: self.rng.randint(0, len(held))]
            self._held[id(box)] = held[len(given) :] + [each for each in given if self.rng.random() < 0.05]
            return given

        def listen(box: LetterBox, seconds: float) -> None:
            wait(box, 0.0 if self._held.get(id(box)) else seconds)

        with ExitStack() as stack:
            for owner, name, better in (
                (TorchTransport, "_do", late), (ThreadPost, "receive", launch), (LetterBox, "receive", receive),
                (LetterBox, "wait", listen),
            ):  # fmt: skip
                stack.enter_context(patch.object(owner, name, better))
            yield


class _One:
    """An engine of one replica behind a client's methods."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.step, self.has_work = core, core.step, core.has_work

    def add(self, requests: list[AddRequest]) -> None:
        for each in requests:
            self.core.add(each)

    def abort(self, request_ids: list[str]) -> None:
        for each in request_ids:
            self.core.abort(each)

    def poll(self, timeout: float) -> StepUpdates:
        return self.step()


def _answers(
    engine: _One | ReplicaClient, made: list[AddRequest], rng: random.Random
) -> tuple[dict[str, Answer], set[str]]:
    """Of requests that come while others run, and which of them were taken back."""
    waiting, answers, gone = list(made), dict[str, Answer](), set[str]()
    abort_often = rng.choice((0.0, 0.0, 0.1))
    while waiting or engine.has_work():
        if waiting and (not engine.has_work() or rng.random() < 0.3):
            number = rng.randint(1, len(waiting))
            engine.add(waiting[:number])
            del waiting[:number]
        running = [each.request_id for each in made if each not in waiting and each.request_id not in gone]
        if running and rng.random() < abort_often:
            gone.add(rng.choice(running))  # it may have ended already
            engine.abort(sorted(gone))
        for update in engine.poll(timeout=20.0):
            assert isinstance(update, RequestUpdate)
            answers.setdefault(update.request_id, Answer()).take(update)
    return answers, gone


def play(seeds: range) -> None:
    """Play ``seeds``, which share an engine. A failure has a note of the seed."""
    name, more = drawn(seeds[0])
    everything, wanted = pool(name)
    weather = Weather()
    weather.rng.seed(seeds[0])
    args = arguments(name, more)
    with weather.over(), watched() as waits:
        engine: EngineCore | ReplicaClient
        if "data_parallel_size" in more:
            engine = ReplicaClient(args, in_threads)
        else:
            engine = build_engine(args, progress=False)
        engine.learn(VOCABULARY)
        try:
            for seed in seeds:
                _play(_One(engine) if isinstance(engine, EngineCore) else engine, seed, weather, everything, wanted)
            if isinstance(engine, EngineCore):
                engine.check_integrity()
        finally:
            engine.close() if isinstance(engine, ReplicaClient) else engine.shutdown()
        waits.check(args.num_ranks * args.data_parallel_size)


def _play(
    engine: _One | ReplicaClient,
    seed: int,
    weather: Weather,
    everything: list[AddRequest],
    wanted: dict[str, Answer],
) -> None:
    rng = random.Random(seed)
    weather.rng.seed(seed)
    some = rng.sample(everything, rng.randint(1, 8))
    made = [replace(each, request_id=f"{seed}-{each.request_id}") for each in some]
    try:
        answers, gone = _answers(engine, made, rng)
        for each in made:
            found, right = answers.get(each.request_id, Answer()), wanted[each.request_id.partition("-")[2]]
            if each.request_id in gone and found.finish_reason is None:
                assert found.token_ids == right.token_ids[: len(found.token_ids)]
            else:
                close(found, right, tolerance=1e-4)
    except BaseException as error:
        error.add_note(f"scenario {seed}")
        raise


def main(ranges: list[str]) -> int:
    """See the module. Gives 1 if any failed; one that hangs ends the process, with where all threads stand."""
    torch.set_num_threads(1)
    failed = played = 0
    for each in ranges:
        first, _, last = each.partition("-")
        seed, end = int(first), int(last or first)
        while seed <= end:
            behind = min((seed // SHARE + 1) * SHARE, end + 1)
            start = time.perf_counter()
            print(f"scenarios {seed}-{behind - 1}: {drawn(seed)}", flush=True)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            try:
                play(range(seed, behind))
                played += behind - seed
            except Exception:
                failed += 1
                traceback.print_exc()
            print(f"  {time.perf_counter() - start:.1f} s; {played} passed, {failed} engines failed", flush=True)
            seed = behind
    faulthandler.cancel_dump_traceback_later()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
