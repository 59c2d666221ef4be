"""How many chunks a second the load generator takes from a trivial server: the most that `headway bench serve` can measure.

    python bench/load_generator.py [--streams 64] [--chunks 2000] [--workers 1] [--gap-ms 2]

The server is a process of its own that writes ready-made events, one write each, round robin over the streams, as an
inference server does that takes a step for all of them; --gap-ms is the time between steps, and with one every event is
read alone, which is the worst case. Give both a core; the processor time per chunk is the figure that
a busy machine does not spoil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket

from headway.cli.bench.online import measure
from headway.cli.bench.serve_args import ServeArgs

EVENT = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1763700000,
        "model": "qwen3_06b",
        "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        "usage": None,
    }
).encode()


def chunk(data: bytes) -> bytes:
    """One event as one HTTP chunk."""
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def serve(listener: socket.socket, num_streams: int, num_chunks: int, gap: float) -> None:
    """Answer whatever is asked; begin when all streams have asked."""
    asyncio.run(_serve(listener, num_streams, num_chunks, gap))


async def _serve(listener: socket.socket, num_streams: int, num_chunks: int, gap: float) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": num_chunks}}).encode()
    writers: list[asyncio.StreamWriter] = []
    full = asyncio.Event()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(request.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        writers.append(writer)
        if len(writers) == num_streams:
            full.set()

    await asyncio.start_server(one, sock=listener)
    await full.wait()
    for writer in writers:
        writer.write(head)
    event = chunk(EVENT)
    for _ in range(num_chunks):
        for writer in writers:
            writer.write(event)
        await asyncio.gather(*(writer.drain() for writer in writers if writer.transport.get_write_buffer_size()))
        await asyncio.sleep(gap)
    for writer in writers:
        writer.write(chunk(usage) + chunk(b"[DONE]") + b"0\r\n\r\n")
        await writer.drain()
    await asyncio.Event().wait()


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    given = (listener, options.streams, options.chunks, options.gap_ms / 1e3)
    server = multiprocessing.Process(target=serve, args=given, daemon=True)
    server.start()
    args = ServeArgs(
        port=listener.getsockname()[1], model="m", num_prompts=options.streams, random_input_len=4,
        ready_check_timeout_sec=0, num_workers=options.workers,
    )  # fmt: skip
    found = asyncio.run(measure(args, show=False))
    server.terminate()
    total = options.streams * options.chunks
    assert found["failed"] == 0 and found["total_output_tokens"] == total, found["errors"]
    cpu_us = found["client_cpu_seconds"] / total * 1e6
    print(
        f"{options.streams} streams, {options.workers} process(es): {total / found['duration']:,.0f} chunks/s; "
        f"{cpu_us:.2f} us of processor time a chunk, so at most {1e6 / cpu_us:,.0f} chunks/s a core"
    )


if __name__ == "__main__":
    main()
