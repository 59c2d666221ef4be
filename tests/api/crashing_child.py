"""A process for jobs that go wrong: ``python -m tests.api.crashing_child``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from headway.api.killable import serve


def start(_: bytes) -> Callable[[bytes], bytes]:
    """Crash, spin, or answer."""

    def work(data: bytes) -> bytes:
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGABRT)  # as native code does when an allocation fails
        while data == b"spin":
            pass
        return data

    return work


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
