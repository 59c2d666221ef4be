"""The engine in a process of its own: its life, its death, and what is left behind (nothing)."""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, EngineDeadError, OutOfMemoryError
from headway.engine import process
from headway.engine.process import ProcessClient
from tests.engine import fake_core
from tests.engine.fake_core import ROOT
from tests.engine.test_client import FACTORY, drain, request


@pytest.fixture
def client() -> Iterator[ProcessClient]:
    made = ProcessClient(EngineArgs(model="fake"), FACTORY)
    yield made
    made.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_whole_life(client: ProcessClient) -> None:
    assert client.info == fake_core.model_info()
    assert client.pid != os.getpid()
    folder = Path(client._link.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    client.add([request("a", 10), request("bad", fake_core.REFUSE), request("fail", fake_core.FAIL)])
    assert client.has_work()
    seen = drain(client, 3)
    assert [t for u in seen["a"] for t in u.new_token_ids] == [11, 12, 13]
    assert seen["bad"][-1].error == "refused"
    assert seen["fail"][-1].error == "failure asked for"
    assert not client.has_work()
    assert client.poll(timeout=0.001) == []
    client.add([request("long", 1, max_tokens=10**6)])
    client.poll()
    assert client.stats().num_running == 1
    client.abort(["long", "unknown"])
    assert client.stats().num_running == 0
    client.close()
    client.close()
    assert is_gone(client.pid)
    assert not folder.exists()
    for call in (client.poll, client.stats, lambda: client.add([]), lambda: client.abort([])):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_an_engine_that_stands_is_given_its_time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that is still being made is killed at once: it would not hear."""
    made = ProcessClient(EngineArgs(model="fake"), FACTORY)
    monkeypatch.setattr(process, "BOOT_EXIT_SECONDS", 0.0)
    made.close()
    assert made._link.child.returncode == 0


def test_a_killed_engine_is_noticed(client: ProcessClient) -> None:
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        while True:
            client.poll()
    with pytest.raises(EngineDeadError):
        client.add([request("a", 1)])
    with pytest.raises(EngineDeadError):
        client.stats()


def test_an_engine_that_exits_is_noticed(client: ProcessClient) -> None:
    client.add([request("a", fake_core.EXIT)])
    with pytest.raises(EngineDeadError, match="status 7"):
        client.poll()


def test_a_failing_step_is_reported_with_its_traceback(client: ProcessClient) -> None:
    client.add([request("a", fake_core.CRASH)])
    with pytest.raises(EngineDeadError, match=r"(?s)crash asked for.*Traceback"):
        client.poll()


def test_an_interrupt_from_the_terminal_does_not_end_the_engine(client: ProcessClient) -> None:
    os.kill(client.pid, signal.SIGINT)
    client.add([request("a", 10)])
    assert drain(client, 1)["a"][-1].finish_reason == "length"


def test_close_wakes_a_blocked_poll_and_leaves_no_thread(client: ProcessClient) -> None:
    errors: list[EngineDeadError] = []
    before = threading.active_count()

    def wait() -> None:
        try:
            client.poll()
        except EngineDeadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.close()
    waiter.join()
    assert errors
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("wrong-config", ConfigError, "that cannot be"),
        ("too-big", OutOfMemoryError, "does not fit"),
        ("bug", EngineDeadError, "a bug"),
        ("exit", EngineDeadError, "status 9"),
    ],
)
def test_boot_errors_cross(
    model: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(kind, match=message) as caught:
        ProcessClient(EngineArgs(model=model), FACTORY)
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []


PARENT = """
import os, sys
from headway.core.config import EngineArgs
from headway.engine.process import ProcessClient
from tests.engine.test_client import request
client = ProcessClient(EngineArgs(model="fake"), "tests.engine.fake_core:build")
client.add([request("a", 1, max_tokens=10**9)])
print(client.pid, client._link.folder, flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_the_engine_dies_with_its_parent() -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ROOT},
        text=True,
    )
    assert script.stdout is not None
    pid, folder = script.stdout.readline().split()
    handle = os.pidfd_open(int(pid))
    try:
        script.communicate("")
        ready, _, _ = select.select([handle], [], [], 60)
        assert ready, "the engine process outlived its parent"
        assert not os.path.exists(folder), "its sockets outlived both"
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_child_needs_no_main_guard(tmp_path: Path) -> None:
    """The user's script runs once: the child does not import it."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('script runs')\n"
        "from headway.core.config import EngineArgs\n"
        "from headway.engine.process import ProcessClient\n"
        "client = ProcessClient(EngineArgs(model='fake'), 'tests.engine.fake_core:build')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "script runs\n"
    assert done.stderr == ""
