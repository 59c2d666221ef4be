"""Ranks that are processes: how they work, and how they end. Whatever happens to one, its name is told and nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, EngineDeadError
from headway.core.messages import AddRequest, RequestUpdate
from headway.engine import rank_messages, ranks
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.process import ProcessClient
from headway.engine.world import World
from headway.parallel.group import RankError
from headway.parallel.mesh import Mesh
from headway.parallel.wire import greet
from tests.engine.fake_core import ROOT
from tests.engine.harness import Answer, request, run
from tests.engine.tiny_grammars import VOCABULARY

SECRET = "0123456789abcdef-for-tests"


def args_for(model: Path, **more: Any) -> EngineArgs:
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 8, "kv_cache_memory_bytes": 2**20}
    more = {"tensor_parallel_size": 2, "distributed_timeout_seconds": 30} | more
    return EngineArgs(model=str(model), dtype="float32", device="cpu", run_ahead=2, **sizes | more)


def some(number: int = 3, **more: Any) -> list[AddRequest]:
    return [request(f"r{i}", [7 + i, 8, 9], seed=i, temperature=float(i % 2), **more) for i in range(number)]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the engine starts."""
    found: list[subprocess.Popen[bytes]] = []
    begin = ranks._begin

    def noting(mesh: Mesh) -> Any:
        follower = begin(mesh)
        assert follower.child is not None
        found.append(follower.child)
        return follower

    monkeypatch.setattr(ranks, "_begin", noting)
    yield found
    assert all(each.poll() is not None for each in found), "a rank was left behind"


def test_tokens_and_a_stopped_rank(tiny_model: Path, noted: list[subprocess.Popen[bytes]]) -> None:
    plain = build_engine(args_for(tiny_model, tensor_parallel_size=1), progress=False)
    wanted = run(plain, some())
    plain.shutdown()
    core = build_engine(args_for(tiny_model, distributed_timeout_seconds=3), progress=False)
    core.learn(VOCABULARY)
    found = run(core, some())
    assert {key: each.token_ids for key, each in found.items()} == {key: each.token_ids for key, each in wanted.items()}
    [follower] = noted
    os.kill(follower.pid, signal.SIGSTOP)
    for each in some():
        core.add(each)
    with pytest.raises(RankError, match=rf"rank 1 \(part 1\), process {follower.pid}, has not been heard of for \d s"):
        while True:
            core.step()
    core.shutdown()
    assert follower.poll() == -signal.SIGKILL


def test_a_killed_rank_ends_an_idle_engine(tiny_model: Path) -> None:
    """The engine in a process of its own: nobody asks it anything, and yet its door learns of it."""
    client = ProcessClient(args_for(tiny_model))
    try:
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
        client.add(some(1))
        answer = Answer()
        while not answer.finish_reason:
            for update in client.poll(timeout=20.0):
                assert isinstance(update, RequestUpdate)
                answer.take(update)
        os.kill(int(children[0]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 \(part 1\), process \d+, was killed by signal 9"):
            while True:
                client.poll(timeout=20.0)
    finally:
        client.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stranger(port: int, secret: str, hello: bytes) -> str:
    """What somebody is told who would be a rank."""
    connection = rank_messages.connected("127.0.0.1", port)
    with connection, pytest.raises(RankError) as told:
        greet(connection, secret.encode(), hello)
    return str(told.value)


def test_two_hosts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host's rank comes over TCP; strangers and other versions are turned away, and it comes in all the same."""
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, SECRET)
    port, built = free_port(), list[EngineCore]()
    args = args_for(tiny_model, nnodes=2, master_port=port)
    leader = threading.Thread(target=lambda: built.append(build_engine(args, progress=False)))
    leader.start()
    assert "does not know the secret" in stranger(port, "another secret of many", rank_messages.hello(1, "control"))
    other = rank_messages.encode(rank_messages.Hello(1, "control", "headway 0.0.1"))
    assert "install the same on all hosts" in stranger(port, SECRET, other)
    assert "not awaited" in stranger(port, SECRET, rank_messages.hello(7, "control"))
    code = "import sys; from headway.core.config import EngineArgs; from headway.engine.node import run_node; "
    code += f"sys.exit(run_node(EngineArgs(nnodes=2, node_rank=1, tensor_parallel_size=2, master_port={port})))"
    node = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT})
    leader.join(60.0)
    [core] = built
    found = run(core, some(1))
    assert found["r0"].finish_reason
    core.shutdown()
    assert node.wait(20.0) == 0


def test_a_reason_is_waited_for() -> None:
    """The error of a collective comes before whoever watches knows the rank: the name wins."""
    world = World(Mesh(2))
    threading.Timer(0.05, world.lose, args=("rank 1 was killed",)).start()
    assert str(world.explain(RankError("connection reset"))) == "rank 1 was killed"
    with pytest.raises(RankError, match="rank 1 was killed"):
        world.check()


@pytest.mark.slow
def test_ray_places_ranks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of this host alone: the follower comes over TCP, and its end is noticed as any other's."""
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'headway[ray]'")
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, SECRET)
    plain = build_engine(args_for(tiny_model, tensor_parallel_size=1), progress=False)
    wanted = run(plain, some())
    plain.shutdown()
    core = build_engine(args_for(tiny_model, distributed_executor_backend="ray"), progress=False)
    found = run(core, some())
    assert {key: each.token_ids for key, each in found.items()} == {key: each.token_ids for key, each in wanted.items()}
    core.shutdown()


def test_without_ray_the_extra_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"headway\[ray\]'; or begin the ranks yourself with --nnodes"):
        build_engine(args_for(tiny_model, distributed_executor_backend="ray"), progress=False)
