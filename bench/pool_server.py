"""Processor time of the embedding server's front end a request, over an engine that computes nothing.

    python -m bench.pool_server [--tokens 32] [--batch 1] [--clients 256] [--requests 8000] [--rounds 3] [--base64]
                                [--repository DIR ...] [--profile FILE] [-- settings of the server]

The server and its engine are processes of their own, the client is this one; a step of the engine sleeps ``--step-ms`` and
gives up to 256 texts one vector of ``--width`` numbers each. ``front end`` is the server's processor time over the requests,
``engine`` that of its process: they change less on a busy machine than requests a second do. With ``--repository``, servers of
other checkouts run beside it, and each round loads them one after the other, so that all meet the same weather; sums over all
rounds follow, as ratios to this checkout's. ``--profile`` writes the server's own calls (cProfile); such a server is slower.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from headway.cli.bench.anchors import server
from headway.cli.bench.embed import _clients
from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address
from headway.core.messages import AddRequest, EngineStats, ModelInfo, StepUpdates
from headway.core.pooling import PoolingInfo
from headway.core.processes import processor_seconds
from headway.core.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.core.config import EngineArgs
    from headway.engine.client import EngineClient

VOCABULARY, MAX_LENGTH, ROWS = 30522, 512, 256
WIDTH_VARIABLE, STEP_VARIABLE, PROFILE_VARIABLE = "POOL_SERVER_WIDTH", "POOL_SERVER_STEP_MS", "POOL_SERVER_PROFILE"
ROOT = Path(__file__).parents[1]


class Core:
    """An engine that gives texts random vectors of length 1; a step takes up to 256 of them."""

    def __init__(self, _: EngineArgs) -> None:
        width = int(os.environ[WIDTH_VARIABLE])
        rows = np.random.default_rng(0).standard_normal((ROWS, width), np.float32)
        self._vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        self._seconds = float(os.environ[STEP_VARIABLE]) * 1e-3
        self._waiting: list[str] = []
        self.info = ModelInfo(
            model="pools", architecture="Pools", dtype="float32", kv_cache_dtype="float32", device="cpu",
            vocab_size=VOCABULARY, max_model_len=MAX_LENGTH, max_num_seqs=ROWS, max_logprobs=0, eos_token_ids=[],
            generation_defaults={}, num_kv_tokens=0, notes=[], tasks=(Task.EMBED,),
            pooling=PoolingInfo(width=width, max_length=MAX_LENGTH),
        )  # fmt: skip

    def add(self, request: AddRequest) -> None:
        self._waiting.append(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> StepUpdates:
        time.sleep(self._seconds)
        names, self._waiting = self._waiting[:ROWS], self._waiting[ROWS:]
        vectors = self._vectors[: len(names)]
        return StepUpdates(
            names, [0] * len(names), {}, vectors.tobytes(), vectors.shape[1], [0.0] * len(names)
        )  # fmt: skip

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=len(self._waiting))

    def shutdown(self) -> None:
        self._waiting.clear()


def build(args: EngineArgs) -> Core:
    """The engine process's factory."""
    return Core(args)


def _connect(args: EngineArgs, **_: Any) -> EngineClient:
    from headway.engine.process import ProcessClient

    return ProcessClient(args, "bench.pool_server:build")


def serve(port: int, options: list[str]) -> int:
    """The server's process."""
    from headway import AsyncLLM
    from headway.api import frontend
    from headway.server import launch, logs
    from headway.server.settings import ServerSettings

    logs.set_up("text")
    settings = ServerSettings(
        port=port, **{name: json.loads(value) for name, _, value in (o.partition("=") for o in options)}
    )
    with patch.object(frontend, "connect", _connect):
        profile = os.environ.get(PROFILE_VARIABLE)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        status = launch.serve(lambda: AsyncLLM("pools", skip_tokenizer_init=True), settings)
        if profile:
            profiler.disable()
            profiler.dump_stats(profile)
        return status


@contextmanager
def running(folder: Path, given: argparse.Namespace, options: list[str]) -> Iterator[tuple[int, int]]:
    """A server of the checkout in ``folder``: its port and process id."""
    port = server.free_port()
    with TemporaryDirectory() as logs:
        log = Path(logs) / "server.log"
        chosen = {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            WIDTH_VARIABLE: str(given.width),
            STEP_VARIABLE: str(given.step_ms),
            PROFILE_VARIABLE: given.profile,
        }
        command = [sys.executable, str(Path(__file__)), "--serve", str(port), *options]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **chosen}, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
            try:
                asyncio.run(server._until_healthy(process, port, log))  # noqa: SLF001
                yield port, process.pid
            finally:
                server.stop(process)


def engine_of(pid: int) -> int:
    """The first process that the server has started."""
    return min(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))


async def load(port: int, pid: int, given: argparse.Namespace) -> dict[str, float]:
    """One round."""
    engine = engine_of(pid)
    address = Address("127.0.0.1", port)
    client, rng = HttpClient(address), random.Random(0)
    more = {"encoding_format": "base64"} if given.base64 else {}
    bodies = []
    for _ in range(256):
        texts = [rng.choices(range(1000, VOCABULARY), k=given.tokens) for _ in range(given.batch)]
        bodies.append(json.dumps({"input": texts[0] if given.batch == 1 else texts, **more}).encode())
    requests = [address.request("POST", "/v1/embeddings", {}, body) for body in bodies]
    try:
        await _clients(client, requests, given.clients)
        before, start = [processor_seconds(each) or 0.0 for each in (pid, engine)], time.perf_counter()
        latencies = await _clients(client, [requests[i % 256] for i in range(given.requests)], given.clients)
        after, seconds = [processor_seconds(each) or 0.0 for each in (pid, engine)], time.perf_counter() - start
    finally:
        await client.close()
    front, inside = ((end - begin) / given.requests * 1e6 for begin, end in zip(before, after, strict=True))
    return {
        "requests_s": given.requests / seconds,
        "front_us": front,
        "engine_us": inside,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
    }


def main() -> None:
    """Print a row for each round and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--base64", action="store_true")
    parser.add_argument("--repository", type=Path, action="append", default=[], help="another checkout, to be compared")
    parser.add_argument("--profile", default="")
    mine, options = sys.argv[1:], []
    if "--" in mine:
        mine, options = mine[: mine.index("--")], mine[mine.index("--") + 1 :]
    given = parser.parse_args(mine)
    folders = [ROOT, *(folder.resolve() for folder in given.repository)]
    print("| checkout | requests/s | front end us | engine us | p50 ms |\n|---|---|---|---|---|")
    sums = {folder: [0.0, 0.0] for folder in folders}
    with ExitStack() as stack:
        live = {folder: stack.enter_context(running(folder, given, options)) for folder in folders}
        for number in range(given.rounds):
            for folder in folders[:: -1 if number % 2 else 1]:
                found = asyncio.run(load(*live[folder], given))
                times = found["front_us"], found["engine_us"]
                sums[folder] = [total + more for total, more in zip(sums[folder], times, strict=True)]
                print(
                    f"| {folder.name} | {found['requests_s']:,.0f} | {times[0]:.0f} | {times[1]:.0f} | {found['p50_ms']:.1f} |",
                    flush=True,
                )
    for folder in folders[1:]:
        front, both = sums[folder][0] / sums[ROOT][0], sum(sums[folder]) / sum(sums[ROOT])
        print(f"{folder.name}: front end {front:.2f}, with the engine {both:.2f} times this checkout's")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(int(sys.argv[2]), sys.argv[3:]))
    main()
