"""A process that generates load: ``python -m headway.cli.bench.worker``, started by ``headway bench serve``.

Standard input brings the plan's length (8 bytes), the plan (msgpack) and, when all processes are ready, the time to begin
(8 bytes, a double). Standard output says "ready" on a line, then a "." for each request that ends, then a newline and the
result (msgpack). SIGTERM ends the run early: the result holds what has ended by then.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import sys

import msgspec

from headway.cli.bench.load import LoadResult, Plan, quieten, run


def main() -> None:
    """The child's side."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    (size,) = struct.unpack("<q", source.read(8))
    plan = msgspec.msgpack.decode(source.read(size), type=Plan)
    quieten()
    sink.write(b"ready\n")
    sink.flush()
    start = source.read(8)
    if len(start) < 8:
        return  # the parent has gone

    def tick() -> None:
        sink.write(b".")
        sink.flush()

    async def load() -> LoadResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        return await run(plan, struct.unpack("<d", start)[0], tick, stop)

    result = asyncio.run(load())
    sink.write(b"\n" + msgspec.msgpack.encode(result))
    sink.flush()


if __name__ == "__main__":
    main()
