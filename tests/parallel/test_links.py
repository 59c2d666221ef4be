"""How ranks speak: rings, frames, handshakes. Strangers learn nothing and hold nobody up."""

from __future__ import annotations

import datetime
import os
import platform
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import headway
from headway.core.errors import ConfigError
from headway.core.seat import Seat
from headway.engine import rank_messages
from headway.engine.ranks import ThreadPost
from headway.parallel import wire
from headway.parallel.box import LetterBox
from headway.parallel.dp import IDLE, Letter
from headway.parallel.group import RankError
from headway.parallel.keys import FarKeys, FileKeys, OwnKeys, wait_for
from headway.parallel.mesh import Mesh
from headway.parallel.rank_store import RankStore
from headway.parallel.ring import Ring, ring_memory
from headway.parallel.wire import Link, answer, greet, welcome

SECRET = b"a secret of many characters"


@contextmanager
def ring(capacity: int) -> Iterator[tuple[Ring, Ring]]:
    memory, (one, other) = ring_memory(capacity), socket.socketpair()
    ends = Ring(memory, one, "the reader"), Ring(memory, other, "the writer")
    os.close(memory)
    yield ends
    for end in ends:
        end.close()


def test_a_long_message_is_waited_for_once_it_has_begun() -> None:
    """A reader that only looks whether something is there gets it whole, though its writer waits for room between pieces."""
    data = bytes(range(256)) * 8
    with ring(256) as (writer, reader):

        def send() -> None:
            for _ in range(5):
                writer.send(3, data)

        sender = threading.Thread(target=send)
        sender.start()
        found: list[tuple[int, bytes]] = []
        while len(found) < 5:
            message = reader.receive(0.0)
            found += [] if message is None else [message]
        sender.join()
        assert found == [(3, data)] * 5 and writer.waits > 0 and reader.receive(0.0) is None


def test_messages_of_all_lengths_go_round() -> None:
    rng = random.Random(1)
    sent = [(rng.randrange(1, 200), rng.randbytes(rng.choice((0, 1, 7, 8, 63, 900)))) for _ in range(3000)]
    with ring(4096) as (writer, reader):

        def send() -> None:
            for kind, data in sent:
                writer.send(kind, data)

        sender = threading.Thread(target=send)
        sender.start()
        found = [reader.receive(10.0) for _ in sent]
        sender.join()
        assert found == sent
        assert reader.receive(0.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_ring_holds_what_was_not_read(seed: int) -> None:
    """Written until there is no room, and read a little, by turns: what is refused is not there, and nothing else is lost."""
    rng, waiting, refused = random.Random(seed), list[tuple[int, bytes]](), 0
    with ring(256 + 8 * seed) as (writer, reader):
        for _ in range(1500):
            if rng.random() < 0.6:
                message = rng.randrange(1, 200), rng.randbytes(rng.choice((0, 1, 8, 20, 40, 56)))
                try:
                    writer.send(*message, seconds=-1.0)
                    waiting.append(message)
                except RankError:
                    refused += 1
            elif waiting:
                assert reader.receive(0.0) == waiting.pop(0)
        assert [reader.receive(0.0) for _ in waiting] == waiting and reader.receive(0.0) is None
        assert refused > 50


def test_a_message_longer_than_the_ring_comes_in_pieces() -> None:
    data = random.Random(2).randbytes(50_000)
    with ring(4096) as (writer, reader):
        sender = threading.Thread(target=writer.send, args=(2, data))
        sender.start()
        assert reader.receive(10.0) == (2, data)
        sender.join()
        assert writer.waits > 0


def test_a_reader_that_does_not_read_is_given_up() -> None:
    with ring(1024) as (writer, _), pytest.raises(RankError, match="the reader has read no message for 0"):
        for _ in range(100):
            writer.send(1, b"x" * 100, seconds=0.05)


def test_a_sleeping_reader_is_woken() -> None:
    with ring(4096) as (writer, reader):
        found: list[object] = []
        asleep = threading.Thread(target=lambda: found.append(reader.receive(20.0)))
        asleep.start()
        while not reader._map[32]:
            pass
        writer.send(7, b"up")
        asleep.join()
        assert found == [(7, b"up")]


def links() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one, "one"), Link(other, "other")


def test_frames_come_whole() -> None:
    one, other = links()
    data = random.Random(3).randbytes(3 * 2**20)

    def send() -> None:
        one.send(3, data)
        one.send(4)

    sender = threading.Thread(target=send)
    sender.start()
    assert other.receive(10.0) == (3, data)
    assert other.receive(10.0) == (4, b"")
    assert other.receive(0.0) is None
    sender.join()
    one.close()
    with pytest.raises(RankError, match="closed its connection"):
        other.receive(10.0)
    other.close()


def test_a_frame_of_a_silly_length_is_refused() -> None:
    one, other = socket.socketpair()
    link = Link(other, "somebody")
    one.send(wire.HEAD.pack(2**31, 1))
    with pytest.raises(RankError, match="none of ours"):
        link.receive(10.0)
    one.close()
    link.close()


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    one, other = links()
    with pytest.raises(RankError, match="taken no message"):
        one.send(1, bytes(64 * 2**20), seconds=0.1)
    one.close()
    other.close()


def shake(theirs: bytes, hello: bytes = b"hello", refusal: str = "") -> tuple[object, object]:
    """What each end has of a handshake."""
    near, far = socket.socketpair()
    found: list[object] = [None, None]

    def listen() -> None:
        try:
            found[0] = welcome(near, SECRET)
            answer(near, refusal)
        except RankError as error:
            found[0] = error
            near.close()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        greet(far, theirs, hello)
    except RankError as error:
        found[1] = error
    far.close()
    listener.join()
    near.close()
    return found[0], found[1]


def test_who_knows_the_secret_is_welcome() -> None:
    assert shake(SECRET) == (b"hello", None)


def test_a_wrong_secret_is_seen_on_both_sides() -> None:
    heard, said = shake(b"another secret of many characters")
    assert isinstance(heard, RankError)
    assert "HEADWAY_RANK_SECRET" in str(said)


def test_the_reason_of_a_refusal_arrives() -> None:
    assert "the leader refused this rank: go away" in str(shake(SECRET, refusal="go away")[1])


def test_a_stranger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)
    near, far = socket.socketpair()
    with near, far, pytest.raises(RankError, match="broke off"):
        welcome(near, SECRET)


def test_proofs_cannot_be_turned_round() -> None:
    """What the leader shows is no use for somebody who wants to be a follower."""
    mine, theirs = b"m" * 32, b"t" * 32
    assert wire.proof(SECRET, b"leader", mine, theirs, b"") != wire.proof(SECRET, b"follower", mine, theirs, b"")
    assert wire.proof(SECRET, b"leader", mine, theirs, b"") != wire.proof(SECRET, b"leader", theirs, mine, b"")


def test_words_are_left_and_found() -> None:
    own, (near, far) = OwnKeys(), links()
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            message = near.receive(0.01)
            if message is not None:
                own.serve(near, *message)

    server = threading.Thread(target=serve)
    server.start()
    keys = FarKeys(far, 10.0)
    assert keys.get("a") is None
    keys.set("a", b"\0\xff")
    assert own.get("a") == keys.get("a") == b"\0\xff"
    assert (own.add("n", 2), keys.add("n", 3)) == (2, 5)
    store = RankStore(keys, 10.0)
    store.wait(["a"])
    assert store.check(["a"]) and not store.check(["b"])
    with pytest.raises(RankError, match="no other rank said 'b' within 0"):
        wait_for(keys, "b", 0.02)
    ended.set()
    server.join()
    near.close()
    far.close()


def test_a_secret_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, "short")
    with pytest.raises(Exception, match="at least 16 characters"):
        rank_messages.secret()


def test_names_of_ranks() -> None:
    assert Mesh(2, 2, 3).name == "rank 3 (stage 0, part 1)"
    assert Mesh(1, 1, 0).name == "rank 0"


def test_words_are_left_in_files(tmp_path: Path) -> None:
    one, two = FileKeys(str(tmp_path)), FileKeys(str(tmp_path))
    assert one.get("a/b") is None
    one.set("a/b", b"\0\xff")
    assert two.get("a/b") == b"\0\xff"
    assert (one.add("n", 2), two.add("n", 3)) == (2, 5)


def test_letters_arrive_in_order_even_where_a_box_is_full_or_late(tmp_path: Path) -> None:
    seats = [Seat(rank, 3, str(tmp_path)) for rank in range(3)]
    first, second = LetterBox(seats[0]), LetterBox(seats[1])
    letters = [Letter(0, 1, step, IDLE) for step in range(2000)]
    for letter in letters:
        first.send(letter)
    third = LetterBox(seats[2])  # it comes when all were written
    for box in (second, third):
        found: list[Letter] = []
        while len(found) < len(letters):
            first.flush()
            box.wait(1.0)
            more = box.receive()
            assert more, "letters are lost"
            found += more
        assert found == letters
    assert not first.receive(), "nobody writes to himself"
    second.close()
    first.send(letters[0])  # to one that has gone: nothing happens
    for box in (first, third):
        box.close()


def test_a_thread_that_listens_for_a_moment_is_not_held() -> None:
    """A follower looks after its device between two messages, and the leader may wait for just that before it sends another.

    Each round leaves the queue empty by way of a message, and then listens for less time than one look takes: a wait that takes
    what is left of its time, below zero by then, for no limit stands still (a ``SimpleQueue``: once in some 10,000 rounds).
    """
    post, rounds = ThreadPost(), list[int]()

    def listen() -> None:
        for each in range(100_000):
            post.send(1, b"")
            assert post.receive(1.0) == (1, b"")
            assert post.receive(1e-9) is None
            rounds.append(each)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(60.0)  # a second, but where it stands still
    assert not thread.is_alive(), f"listening for no time did not end in round {len(rounds)}"
    assert len(rounds) == 100_000


class Still:
    """Keys of which some are set."""

    def __init__(self, **values: bytes) -> None:
        self.values, self.asked, self.added = values, list[str](), list[tuple[str, int]]()

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def get(self, name: str) -> bytes | None:
        self.asked.append(name)
        return self.values.get(name)

    def add(self, name: str, number: int) -> int:
        self.added.append((name, number))
        return 40 + number


def test_torch_finds_the_words_in_its_own_forms() -> None:
    keys = Still(a=b"1", b=b"2")
    store = RankStore(keys, 0.01)
    store.set("text", "häßlich")
    store.set("bytes", b"\0\xff")
    assert (keys.values["text"], keys.values["bytes"]) == ("häßlich".encode(), b"\0\xff")
    assert store.get("a") == b"1" and store.add("n", 2) == 42 and keys.added == [("n", 2)]
    assert store.check(["a", "b"]) and not store.check(["a", "c"]) and not store.check(["c", "a"])
    keys.asked.clear()
    store.wait(["a", "b"])
    assert keys.asked == ["a", "b"], "for each of them"


def test_words_are_waited_for_as_long_as_is_said() -> None:
    store = RankStore(Still(), 0.01)
    for wait, says in (
        (lambda: store.get("c"), "0.01 s"),
        (lambda: store.wait(["c"]), "0.01 s"),
        (lambda: store.wait(["c"], datetime.timedelta(seconds=0.02)), "0.02 s"),
    ):
        with pytest.raises(RankError, match=f"no other rank said 'c' within {says}"):
            wait()
    store.set_timeout(datetime.timedelta(seconds=0.03))
    with pytest.raises(RankError, match=r"within 0\.03 s"):
        store.get("c")


def test_who_waits_looks_whether_there_is_a_point_in_it() -> None:
    """Not where the word is there already."""
    looks: list[str] = []

    def look() -> None:
        looks.append("")
        if len(looks) == 3:
            raise RankError("it is over")

    store = RankStore(Still(a=b"1"), 60.0, look)
    assert store.get("a") == b"1" and not looks
    for wait in (lambda: store.get("c"), lambda: store.wait(["c"])):
        looks.clear()
        with pytest.raises(RankError, match="it is over"):
            wait()


def test_a_leader_that_does_not_answer_is_given_up() -> None:
    one, other = links()
    keys = FarKeys(one, 0.02)
    with pytest.raises(RankError, match=r"one has not answered for 0\.02 s"):
        keys.get("a")
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("size", "taken"), [(0, True), (wire.MOST_HELLO_BYTES, True), (wire.MOST_HELLO_BYTES + 1, False)]
)
def test_greetings_up_to_their_limit(size: int, taken: bool) -> None:
    heard, said = shake(SECRET, hello=bytes(size))
    assert (heard == bytes(size), said is None) == (taken, taken)
    if not taken:
        assert "something else than a rank would" in str(heard)


def test_a_long_refusal_is_cut() -> None:
    said = str(shake(SECRET, refusal="x" * 3 * wire.MOST_HELLO_BYTES)[1])
    assert said.endswith("x") and said.count("x") == wire.MOST_HELLO_BYTES


def test_a_stranger_who_breaks_off_is_told_apart() -> None:
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises(RankError, match="no handshake with the leader"):
        greet(near, SECRET, b"hello")


@pytest.mark.parametrize(("length", "fits"), [(0, False), (15, False), (16, True), (64, True)])
def test_how_long_a_secret_must_be(length: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_messages.SECRET_VARIABLE, "s" * length)
    if fits:
        assert rank_messages.secret() == b"s" * length
    else:
        with pytest.raises(ConfigError, match="openssl rand"):
            rank_messages.secret()
    monkeypatch.delenv(rank_messages.SECRET_VARIABLE)
    with pytest.raises(ConfigError, match="shared secret"):
        rank_messages.secret()


def test_ranks_introduce_themselves() -> None:
    told = rank_messages.decode_hello(rank_messages.hello(3, rank_messages.STEPS))
    assert (told.rank, told.use, told.version) == (3, "steps", rank_messages.version())
    for part in (headway.__version__, torch.__version__, platform.machine()):
        assert part in told.version, "what must be equal on all ranks"
    for data in (b"", b"nonsense", rank_messages.encode(["3", "steps", ""])):
        with pytest.raises(RankError, match="not Headway's"):
            rank_messages.decode_hello(data)
