"""A server whose model has two ranks: what its clients get when a rank dies, and how it comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.parallel import served
from tests.parallel.processes import SECONDS, children, ended, state, until
from tests.server.live import Live

PATH = "/v1/completions"
ENDLESS = {"prompt": "once", "max_tokens": served.MAX_LEN - 8, "ignore_eos": True, "temperature": 0}


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[Live]:
    sizes = {
        "port": 0, "device": "cpu", "dtype": "float32", "max_model_len": served.MAX_LEN, "max_num_seqs": 2, "block_size": 8,
        "kv_cache_memory_bytes": 2**26, "tensor_parallel_size": 2, "distributed_timeout_seconds": 30,
    }  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (sizes | options).items()]
    with Live(["-m", "headway", "serve", str(model), *flags]) as live:
        yield live.wait_ready()


def ranks_of(live: Live) -> tuple[int, int]:
    """The processes of the engine, which leads, and of the rank that follows."""
    [leader] = [each for each in children(live.process.pid) if children(each)]
    [follower] = children(leader)
    return leader, follower


def rest_of(lines: Iterator[str]) -> tuple[list[Any], str]:
    """What still comes of a stream: its events, and its last line."""
    rest = [line for line in lines if line]
    return [json.loads(line.removeprefix("data: ")) for line in rest[:-1]], rest[-1]


def asked(live: Live) -> str:
    with live.client() as client:
        answer = client.post(PATH, json={"prompt": "tell", "max_tokens": 20, "ignore_eos": True, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def waiting(client: httpx.Client) -> int:
    """Requests that the engine has no place for yet."""
    lines = client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("headway:num_requests_waiting")))


def cut_short(client: httpx.Client, rank: int, how: signal.Signals) -> None:
    """A streamed answer ends with an error when process ``rank`` gets a signal."""
    with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(rank, how)
        events, last = rest_of(lines)
    assert last == "data: [DONE]" and events[-1]["error"]["code"] == "engine_dead"


def test_a_dead_rank_answers_everybody_and_the_server_comes_back(tmp_path: Path) -> None:
    with serving(served.save(tmp_path), restart=1) as live, live.client() as client, ThreadPoolExecutor(3) as pool:
        told = asked(live)
        leader, follower = ranks_of(live)

        def whole() -> httpx.Response:
            return client.post(PATH, json=ENDLESS)

        with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            others = [pool.submit(whole) for _ in range(3)]  # one runs, and two wait for a place
            until(lambda: waiting(client) == 2, "the others were not taken in")
            os.kill(follower, signal.SIGKILL)
            events, last = rest_of(lines)
        assert last == "data: [DONE]" and events[-1]["error"]["code"] == "engine_dead"
        assert all("error" not in event for event in events[:-1])
        for each in others:
            failed = each.result(SECONDS)
            assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_dead"
        live.wait_for(r"rank 1 \(part 1\), process \d+, was killed by signal 9")
        ended(leader)

        live.wait_ready(2)
        assert asked(live) == told
        leader, follower = ranks_of(live)
        cut_short(client, leader, signal.SIGKILL)
        assert live.wait() == 1
    live.wait_for("the engine process was killed by signal 9")
    ended(follower)


def test_a_rank_that_stops_ends_the_server(tmp_path: Path) -> None:
    """Without ``--restart`` whoever runs the server learns of it by its status."""
    with serving(served.save(tmp_path), distributed_timeout_seconds=5) as live, live.client() as client:
        _, follower = ranks_of(live)
        cut_short(client, follower, signal.SIGSTOP)
        assert live.wait() == 1
    live.wait_for(rf"rank 1 \(part 1\), process {follower}, has not been heard of for \d s")
    assert state(follower) is None
