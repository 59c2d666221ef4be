"""The leader and its ranks: who is taken in and who is turned away, how their ends are learned of, and a host that follows."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.engine import node, rank_messages, ranks
from headway.engine.process import _Link
from headway.engine.ranks import FarPost, _Follower, _meet, _Watch
from headway.engine.world import World
from headway.parallel.group import RankError
from headway.parallel.keys import OwnKeys
from headway.parallel.mesh import Mesh
from headway.parallel.wire import Link, greet
from headway.runner.followers import STOP

SECRET = b"a secret of many characters"
PLACE = Mesh(2, 1, 1)


def met(hello: bytes, missing: set[tuple[int, str]]) -> tuple[dict[tuple[int, str], Link], str]:
    """What the leader has of a connection whose other end says ``hello``, and what that end is told."""
    near, far = socket.socketpair()
    links: dict[tuple[int, str], Link] = {}
    told: queue.Queue[str] = queue.Queue()

    def come() -> None:
        try:
            greet(far, SECRET, hello)
            told.put("")
        except RankError as error:
            told.put(str(error))

    guest = threading.Thread(target=come)
    guest.start()
    _meet(near, "somewhere", SECRET, Mesh(4), links, missing)
    guest.join()
    far.close()
    for link in links.values():
        link.close()
    return links, told.get(timeout=10)


def test_ranks_that_are_awaited_are_taken_in_once() -> None:
    wanted = {(2, "control"), (2, "steps"), (3, "control")}
    links, told = met(rank_messages.hello(2, "steps"), wanted)
    assert [*links] == [(2, "steps")] and told == "" and links[2, "steps"].name == "rank 2 (part 2)"
    for rank, use in ((2, "other"), (1, "control"), (3, "steps")):
        links, told = met(rank_messages.hello(rank, use), wanted)
        assert not links and f"rank {rank} is not awaited, or is there already" in told


def test_ranks_of_another_version_are_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    old = rank_messages.encode(rank_messages.Hello(2, "steps", "headway 0.0"))
    links, told = met(old, {(2, "steps")})
    assert not links and "it runs 'headway 0.0', and the leader 'headway " in told and "install the same" in told
    assert "turned away a connection from somewhere" in caplog.text


def watched(seconds: float = 1e6) -> tuple[World, _Watch, Link, _Follower]:
    """A world with one follower, and the follower's end of their link."""
    near, far = socket.socketpair()
    world = World(Mesh(2), seconds=seconds)
    one = _Follower(PLACE, Link(near, "rank 1"), SimpleNamespace(), None)
    return world, _Watch(world, OwnKeys(), [one]), Link(far, "the leader"), one


@pytest.mark.parametrize("how", ["fails", "leaves", "is silent"])
def test_the_first_that_fails_leaves_or_falls_silent_ends_the_world(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WATCH_SECONDS", 0.01)
    world, watch, rank, follower = watched(0.05 if how == "is silent" else 1e6)
    if how == "fails":
        rank.send(rank_messages.FAILED, "ValueError: nö".encode())
    elif how == "leaves":
        rank.close()
    assert world._known.wait(20)
    says = {"fails": "failed: ValueError: nö", "leaves": "has closed its connection"}
    assert world.lost == f"rank 1 (part 1) {says.get(how, 'has not been heard of for 0 s')}"
    watch.end()
    rank.close()
    follower.link.close()


def test_what_followers_do_when_they_were_told_to_stop_is_no_failure() -> None:
    before = {*threading.enumerate()}
    world, watch, rank, follower = watched()
    threads = {*threading.enumerate()} - before
    watch.end()
    rank.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert world.lost is None
    follower.link.close()


@pytest.mark.parametrize("lost", [None, "it is lost"])
def test_followers_are_told_to_stop_unless_the_world_has_ended(lost: str | None) -> None:
    world, sent = World(Mesh(2)), list[Any]()
    world.lost = lost
    post = SimpleNamespace(send=lambda kind, data: sent.append((kind, data)), close=lambda: sent.append("closed"))
    link = SimpleNamespace(close=lambda: sent.append("hung up"))
    ranks._leave(world, [_Follower(PLACE, link, post, None)])  # type: ignore[arg-type]
    assert sent == [*([] if lost else [(STOP, b"")]), "hung up", "closed"]


def test_who_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "EXIT_SECONDS", 0.05)
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    silent = SimpleNamespace(send=lambda *_: None, close=lambda: None)
    ranks._leave(World(Mesh(2)), [_Follower(PLACE, silent, silent, sleeper)])  # type: ignore[arg-type]
    assert sleeper.returncode == -signal.SIGKILL


def test_messages_to_other_hosts_have_their_time() -> None:
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=lambda *given: sent.append(given), close=lambda: sent.append("closed"))
    post = FarPost(link, EngineArgs(model="x", distributed_timeout_seconds=7))
    post.send(3, b"x")
    post.close()
    assert sent == [(3, b"x", 7.0), "closed"]


def test_a_leader_may_begin_to_listen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, naps, answers = [0.0], list[float](), [OSError("refused"), OSError("refused"), "connected"]

    def connect(place: Any, timeout: float) -> Any:
        assert place == ("here", 5)
        found = answers.pop(0) if answers else OSError("refused")
        if isinstance(found, OSError):
            raise found
        return found

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += 250.0

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr(rank_messages, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert rank_messages.connected("here", 5) == "connected" and naps == [0.5, 0.5]  # type: ignore[comparison-overlap]
    with pytest.raises(RankError, match="no leader at here port 5: refused"):
        rank_messages.connected("here", 5)
    assert len(naps) == 5, "ten minutes"


class Child:
    """A follower's process that ends as it is told to."""

    def __init__(self, *codes: int | None) -> None:
        self.codes, self.killed = list(codes), False

    def poll(self) -> int | None:
        if self.killed:
            return -9
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return -9


@pytest.mark.parametrize(
    ("codes", "status", "says"),
    [
        (((None, 0), (None, None, 0)), 0, ""), (((None,), (None, 3)), 1, "rank 3 exited with status 3"),
        (((None, -15), (None,)), 1, "rank 2 was killed by signal 15"),
    ],
)  # fmt: skip
def test_a_host_that_does_not_lead_ends_with_the_first_of_its_ranks(
    codes: Any, status: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, SECRET.decode())
    children, begun = [Child(*each) for each in codes], list[Any]()

    def begin(command: list[str], env: dict[str, str], **_: Any) -> Any:
        begun.append((command[-4:], env[rank_messages.SECRET_VARIABLE]))
        return children[len(begun) - 1]

    monkeypatch.setattr("subprocess.Popen", begin)
    monkeypatch.setattr(node, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    args = EngineArgs(model="x", tensor_parallel_size=4, nnodes=2, node_rank=1, master_addr="there", master_port=77)
    assert node.run_node(args) == status and says in caplog.text
    assert begun == [(["far", "there", "77", str(rank)], SECRET.decode()) for rank in (2, 3)], "no secret in arguments"
    assert all(each.poll() is not None for each in children), "nobody is left behind"


def test_a_host_that_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="x", tensor_parallel_size=4, nnodes=2)
    with pytest.raises(ConfigError, match="node_rank=0 leads"):
        node.run_node(args)
    monkeypatch.delenv(rank_messages.SECRET_VARIABLE, raising=False)
    args.node_rank = 1
    with pytest.raises(ConfigError, match="shared secret"):
        node.run_node(args)


@pytest.mark.parametrize(
    ("code", "says"), [("os._exit(3)", "exited with status 3"), ("os.kill(os.getpid(), 9)", "was killed by signal 9")]
)
def test_how_a_process_ended(code: str, says: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; {code}"])
    process.wait()
    link: Any = SimpleNamespace(child=process)
    assert str(_Link.obituary(link)) == f"the engine process {says}"
    near, far = socket.socketpair()
    follower = _Follower(PLACE, Link(near, "x"), SimpleNamespace(), process)
    assert follower.end() == says and follower.name == f"rank 1 (part 1), process {process.pid},"
    away = _Follower(PLACE, Link(far, "x"), SimpleNamespace(), None)
    assert (away.end(), away.name) == ("has closed its connection", "rank 1 (part 1)")
    for each in (follower, away):
        each.link.close()
