"""The process that compiles grammars: ``python -m headway.api.structured.worker``; see ``headway.api.killable``.

A job is a msgpack ``Task``, its answer an ``Outcome``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from headway.api.killable import serve
from headway.api.structured.compile import Task, compile_task


def start(_: bytes) -> Callable[[bytes], bytes]:
    """What compiles one task after the other."""
    decode = msgspec.msgpack.Decoder(Task).decode
    return lambda data: msgspec.msgpack.encode(compile_task(decode(data)))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], start))
