"""What happens to a rank in the middle of its work, and what its leader, its clients and other hosts are told of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError
from headway.core.messages import RequestUpdate
from headway.engine import rank_messages
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.process import ProcessClient
from headway.parallel.group import RankError
from tests.engine.fake_core import ROOT
from tests.engine.harness import request
from tests.parallel import served
from tests.parallel.processes import SECONDS, Cable, children, ended, stop
from tests.parallel.test_processes import SECRET, free_port

KILLED = r"rank 1 \(part 1\), process \d+, was killed by signal 9"
ENDLESS: dict[str, Any] = {"max_tokens": served.MAX_LEN - 8, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.save(tmp_path_factory.mktemp("served"))


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "dtype": "float32", "device": "cpu", "max_model_len": served.MAX_LEN, "max_num_seqs": 4, "block_size": 8,
        "kv_cache_memory_bytes": 2**26, "tensor_parallel_size": 2, "distributed_timeout_seconds": 30, "run_ahead": 2, **more,
    }  # fmt: skip


def two(model: Path, **more: Any) -> EngineArgs:
    return EngineArgs(model=str(model), **sizes(**more))


# -- killed in the middle of a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("apart", "still"),
    [(False, True), (True, False), *[pytest.param(each, each, marks=pytest.mark.soak) for each in (False, True)]],
)
def test_a_rank_killed_under_an_llm(model: Path, apart: bool, still: bool) -> None:
    """Whoever waits for answers gets the rank's name, and whoever asks later an error: the engine in a process of its own or
    not, the rank killed as it runs or while the leader waits for it in a step."""
    before = set(children(os.getpid()))
    with LLM(str(model), multiprocess=apart, **sizes()) as llm, ThreadPoolExecutor(1) as pool:
        llm.generate("hello", SamplingParams(max_tokens=4))
        [child] = set(children(os.getpid())) - before
        rank = children(child)[0] if apart else child
        asked = threading.Event()
        add = llm._client.add

        def noted(requests: Any) -> None:
            add(requests)
            asked.set()

        llm._client.add = noted  # type: ignore[method-assign]
        waits = pool.submit(llm.generate, ["first", "second"], SamplingParams(**ENDLESS), use_tqdm=False)
        assert asked.wait(SECONDS)
        if still:
            stop(rank)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=KILLED):
            waits.result(SECONDS)
        with pytest.raises(EngineDeadError):
            llm.generate("late", SamplingParams(max_tokens=1))
    ended(rank)


def test_a_rank_killed_under_an_async_llm(model: Path) -> None:
    """Each open stream ends with the error behind the tokens that have come."""
    before = set(children(os.getpid()))

    async def stream(llm: AsyncLLM, text: str, begun: Callable[[str], None]) -> int:
        found = 0
        with pytest.raises(EngineDeadError, match=KILLED):
            async for output in llm.generate(text, SamplingParams(**ENDLESS)):
                found = len(output.outputs[0].token_ids)
                begun(text)
        return found

    async def all_of_it() -> None:
        llm = AsyncLLM(str(model), **sizes())
        try:
            [child] = set(children(os.getpid())) - before
            [rank] = children(child)
            began = set[str]()

            def begun(text: str) -> None:
                if text not in began:
                    began.add(text)
                    if len(began) == 2:
                        os.kill(rank, signal.SIGKILL)

            streams = [stream(llm, text, begun) for text in ("first", "second")]
            async with asyncio.timeout(SECONDS):
                assert all(await asyncio.gather(*streams))
                await llm.wait_dead()
            with pytest.raises(EngineDeadError, match=KILLED):
                async for _ in llm.generate("late", SamplingParams(max_tokens=1)):
                    pass
        finally:
            llm.shutdown()

    asyncio.run(all_of_it())
    assert set(children(os.getpid())) <= before


# -- silent, slow --------------------------------------------------------------------------------------------------------


def client_of(args: EngineArgs) -> tuple[ProcessClient, int]:
    """An engine in a process of its own, and its follower."""
    client = ProcessClient(args)
    [rank] = children(client.pid)
    return client, rank


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_followers_of_a_stopped_leader_leave(model: Path, busy: bool) -> None:
    """It says nothing, so they cannot know whether it ever will. When it goes on it finds that they have gone."""
    client, rank = client_of(two(model, distributed_timeout_seconds=3))
    try:
        if busy:
            client.add([request("a", [7, 8, 9], **ENDLESS)])
            assert client.poll(timeout=SECONDS)
        stop(client.pid)
        ended(rank)
        os.kill(client.pid, signal.SIGCONT)
        with pytest.raises(EngineDeadError, match=r"rank 1 \(part 1\)"):
            while True:
                client.poll(timeout=SECONDS)
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.close()


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_followers_of_a_dead_leader_leave(model: Path, busy: bool) -> None:
    client, rank = client_of(two(model))
    try:
        if busy:
            client.add([request("a", [7, 8, 9], **ENDLESS)])
            assert client.poll(timeout=SECONDS)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="the engine process was killed by signal 9"):
            while True:
                client.poll(timeout=SECONDS)
        ended(rank)
    finally:
        client.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Followers are ``slow_follower``; those that were begun."""
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def begin(command: list[str], **more: Any) -> Any:
        if "headway.engine.follower" not in command:  # a compiler, for one
            return popen(command, **more)
        begun.append(
            popen(["tests.parallel.slow_follower" if "follower" in each else each for each in command], **more)
        )
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.syspath_prepend(ROOT)
    yield begun
    assert all(each.poll() is not None for each in begun), "a rank was left behind"


def test_a_rank_too_slow_for_an_exchange(model: Path, slow: list[subprocess.Popen[bytes]]) -> None:
    """It says that it lives, so nobody knows whom to blame: those who waited are named, and their group."""
    core = build_engine(two(model, distributed_timeout_seconds=5), progress=False)
    core.add(request("a", [7, 8, 9], **ENDLESS))
    with pytest.raises(
        RankError, match=r"^rank 0 \(part 0\), group tensor0-0: another rank has gone or does not answer"
    ):
        while True:
            core.step()
    [rank] = slow
    assert rank.poll() is None, "it still is at its step"
    assert core.has_work(), "whoever turns the loop is told again"
    with pytest.raises(RankError, match="group tensor0-0"):
        core.step()
    core.shutdown()
    assert rank.poll() == -signal.SIGKILL


# -- two hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "silent"),
    [(True, False), (False, True), *[pytest.param(each, each, marks=pytest.mark.soak) for each in (False, True)]],
)
def test_the_network_between_two_hosts_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, silent: bool
) -> None:
    """Both sides end, and each says who was lost: connections are cut, or nothing arrives any more."""
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, SECRET)
    port, built = free_port(), list[EngineCore]()
    cable = Cable(port)
    args = two(model, nnodes=2, master_port=port, distributed_timeout_seconds=5 if silent else 30)
    leader = threading.Thread(target=lambda: built.append(build_engine(args, progress=False)))
    leader.start()
    code = "import sys, logging; from headway.core.config import EngineArgs; from headway.engine.node import run_node; "
    code += "logging.basicConfig(); "
    code += f"sys.exit(run_node(EngineArgs(nnodes=2, node_rank=1, tensor_parallel_size=2, master_port={cable.port})))"
    node = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.PIPE, text=True
    )
    try:
        leader.join(SECONDS)
        [core] = built
        core.add(request("a", [7, 8, 9], **(ENDLESS if busy else {"max_tokens": 3})))
        updates: list[RequestUpdate] = []
        while not updates or (core.has_work() and not busy):
            updates += core.step()
        cable.fall_silent() if silent else cable.cut()
        lost = r"has not been heard of for \d s" if silent else "has closed its connection"
        with pytest.raises(RankError, match=rf"^rank 1 \(part 1\) {lost}"):
            while True:
                core.step()
        _, said = node.communicate(timeout=SECONDS)
        assert node.returncode == 1
        reason = r"not been heard of for \d s" if silent else "(gone|closed its connection)"
        assert re.search(rf"rank 1 \(part 1\) ends: the leader has {reason}", said) or (
            busy and "another rank has gone" in said
        )
        assert "rank 1 exited with status 1; the others of this host are ended" in said
        core.shutdown()
    finally:
        cable.close()
        node.kill()
        node.wait()
