"""An idle server costs nothing: every thread of each of its processes sleeps in a system call that has no timeout.

The kernel shows the call a thread is blocked in, and its arguments, in /proc/PID/task/TID/syscall: no clock is needed to
see that nobody would wake up by himself.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import SECONDS, Live, live_parrot

NO_TIMEOUT = (1 << 64) - 1, (1 << 32) - 1, 0
"""-1 as the kernel shows it, and a null pointer."""
TIMEOUT_AT = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3, "ppoll": 2, "futex": 3, "recvfrom": None, "read": None}
"""Which argument is the timeout: milliseconds, or a pointer."""
NUMBERS = {7: "poll", 232: "epoll_wait", 281: "epoll_pwait", 271: "ppoll", 202: "futex", 45: "recvfrom", 0: "read"}
"""Of x86-64."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads Linux' numbers of system calls"
)


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def restless(pid: int) -> list[str]:
    """Threads that run, or would wake up by themselves: process, thread, and what the kernel says."""
    found = []
    for process in family(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            shown = (task / "syscall").read_text().split()
            name = NUMBERS.get(int(shown[0])) if shown[0].lstrip("-").isdigit() else None
            place = -1 if name is None else TIMEOUT_AT[name]
            asleep = place is None or (place >= 0 and int(shown[1 + place], 16) in NO_TIMEOUT)
            if name in ("poll", "epoll_wait", "epoll_pwait") and place is not None:
                asleep = asleep and int(shown[1 + place], 16) != 0  # a timeout of 0 is polling
            if not asleep:
                found.append(f"{process} {(task / 'comm').read_text().strip()}: {' '.join(shown)}")
    return found


def watch(pid: int) -> list[str]:
    """What is restless once things have settled; [] as soon as nothing is."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            found = restless(pid)
        except FileNotFoundError:  # a thread that has just ended
            continue
        except PermissionError:
            pytest.skip("/proc/PID/syscall may not be read here")
        if not found:
            break
    return found


def test_the_watch_sees_what_would_wake_up() -> None:
    """Otherwise it proves nothing."""
    sources = {
        "select.poll().poll()": True,
        "select.epoll().poll()": True,
        "threading.Event().wait()": True,
        "select.poll().poll(600000)": False,
        "select.epoll().poll(600)": False,
        "threading.Event().wait(600)": False,
        "time.sleep(600)": False,
    }
    for source, sleeps in sources.items():
        text = f"import select, threading, time; print(1, flush=True); {source}"
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.read(1)
            try:
                if sleeps:
                    assert watch(process.pid) == []
                else:
                    state = Path(f"/proc/{process.pid}/task/{process.pid}/syscall")
                    while not state.read_text()[0].isdigit() or state.read_text().startswith("1 "):
                        pass
                    assert restless(process.pid), source
            finally:
                process.kill()


def test_an_idle_server_sleeps() -> None:
    with live_parrot(log_stats_interval=1.0) as live:
        live.wait_ready()
        assert watch(live.process.pid) == [], "before the first request"
        with live.client() as client:
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
            assert client.get("/metrics").status_code == 200
        assert watch(live.process.pid) == [], "after the last one"


def test_an_idle_engine_sleeps(smollm2: Live) -> None:
    with smollm2.client() as client:
        body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"grammar": 'start: "a"+'}}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert watch(smollm2.process.pid) == []
