"""The two ends of a control connection: each hears that the other lives, and a rank whose leader does not ends its process."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from headway.engine import follower, rank_messages
from headway.engine.follower import Leader
from headway.engine.ranks import ThreadPost, _Follower, _Watch
from headway.engine.world import World
from headway.parallel.group import RankError
from headway.parallel.keys import FarKeys, OwnKeys
from headway.parallel.mesh import Mesh
from headway.parallel.wire import Link

SECONDS = 60.0
"""How long anything may take before a test fails."""
NEVER = 1e6


class Ends:
    """A rank's end of a connection, which tells instead of ending its process, and the leader's."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.rank, self.leader = Leader(near, "the leader"), Link(far, "rank 1")
        self.left: queue.Queue[str] = queue.Queue()

        def leave(reason: str) -> None:
            self.left.put(reason)
            self.rank.end()

        setattr(self.rank, "_leave", leave)  # noqa: B010 - no test may end its process

    def beat(self) -> None:
        """Wait for a sign of the rank's life."""
        message = self.leader.receive(SECONDS)
        assert message == (rank_messages.BEAT, b"")


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.rank.end()
    made.leader.close()
    made.rank.close()


def test_signs_of_life_come_within_the_shortest_time_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "BEAT_SECONDS", NEVER)
    ends.rank.watch("rank 1", 1.0)
    for _ in range(3):
        ends.beat()


def test_a_leader_that_was_never_heard_is_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes in the ranks of other hosts, which may come late, before it listens to the first."""
    monkeypatch.setattr(follower, "BEAT_SECONDS", 0.001)
    ends.rank.watch("rank 1", 0.01)
    for _ in range(30):
        ends.beat()
    assert ends.left.empty()


def test_a_leader_that_falls_silent_is_left(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "BEAT_SECONDS", 0.01)
    ends.rank.watch("rank 1", 0.2)
    ends.leader.send(rank_messages.BEAT)
    assert ends.left.get(timeout=SECONDS) == "the leader has not been heard of for 0 s"


def test_a_rank_whose_leader_has_gone_ends_although_its_main_thread_waits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device it may wait for what never comes."""
    monkeypatch.setattr(follower, "LEAVE_SECONDS", 0.01)
    ends.rank.watch("rank 1", NEVER)
    ends.leader.close()
    assert ends.left.get(timeout=SECONDS) == "the leader has closed its connection"


def test_a_rank_that_was_told_to_stop_ends_as_it_should(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader closes the connection behind the message: a moment later the rank has ended by itself."""
    monkeypatch.setattr(follower, "LEAVE_SECONDS", SECONDS)
    before = set(threading.enumerate())
    ends.rank.watch("rank 1", NEVER)
    [listener] = [each for each in set(threading.enumerate()) - before if each.name == "headway-listens"]
    ends.leader.close()
    ends.rank.end()
    listener.join(SECONDS)
    assert not listener.is_alive() and ends.left.empty()


def test_answers_are_told_from_signs_of_life(ends: Ends) -> None:
    """Ranks ask for what others have left, while the leader says that it lives."""
    own = OwnKeys()
    own.set("a", b"1")
    ends.rank.watch("rank 1", NEVER)

    def serve() -> None:
        for _ in range(20):
            ends.leader.send(rank_messages.BEAT)
        while (message := ends.leader.receive(SECONDS)) is not None and message[0] == rank_messages.BEAT:
            pass
        assert message is not None
        own.serve(ends.leader, *message)

    server = threading.Thread(target=serve)
    server.start()
    assert FarKeys(ends.rank, SECONDS).get("a") == b"1"
    server.join(SECONDS)
    with pytest.raises(RankError, match="the leader has not answered for 0"):
        FarKeys(ends.rank, 0.02).get("b")


def test_the_leader_answers_signs_of_life() -> None:
    near, far = socket.socketpair()
    rank = Link(far, "the leader")
    watched = _Follower(Mesh(2, 1, 1), Link(near, "rank 1"), ThreadPost(), None)
    watch = _Watch(World(Mesh(2), seconds=NEVER), OwnKeys(), [watched])
    for _ in range(3):
        rank.send(rank_messages.BEAT)
        assert rank.receive(SECONDS) == (rank_messages.BEAT, b"")
    watch.end()
    rank.close()
    watched.link.close()
