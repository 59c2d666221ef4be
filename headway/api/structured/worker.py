"""The process that compiles grammars: ``python -m headway.api.structured.worker``. Its parent kills it when it takes too long.

Frames on standard input and output: four bytes of length, little-endian, then a msgpack ``Task`` or ``Outcome``.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from headway.api.structured.compile import Task, compile_task

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
HEADER = struct.Struct("<I")


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer tasks until the parent goes."""
    decoder = msgspec.msgpack.Decoder(Task)
    while len(header := source.read(HEADER.size)) == HEADER.size:
        data = source.read(HEADER.unpack(header)[0])
        answer = msgspec.msgpack.encode(compile_task(decoder.decode(data)))
        sink.write(HEADER.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    """Bound this process's memory and serve its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    with contextlib.suppress(ValueError, OSError):  # an administrator may have set lower limits
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
