"""Several processes that generate load together: the side of the process that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections.abc import Callable
from time import perf_counter

import msgspec

from headway.cli.bench.load import LoadResult, Plan
from headway.core.errors import HeadwayError

START_DELAY = 0.2
"""Seconds between the last process's being ready and the start, so that all have read it."""


async def run_workers(plans: list[Plan], on_done: Callable[[], None], stop: asyncio.Event) -> LoadResult:
    """Run each plan in a process of its own, all from the same moment.

    Args:
        on_done: called whenever a request ends.
        stop: when it is set, open requests are given up; the result holds those that have ended.

    Raises:
        HeadwayError: a process died.
    """
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headway.cli.bench.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        for _ in plans
    ]  # fmt: skip
    try:
        for child, plan in zip(children, plans):
            packed = msgspec.msgpack.encode(plan)
            assert child.stdin is not None
            child.stdin.write(struct.pack("<q", len(packed)) + packed)
        for child in children:
            assert child.stdout is not None
            if await child.stdout.readline() != b"ready\n":
                raise HeadwayError("a process of the load generator died before it began")
        begin = perf_counter() + START_DELAY
        for child in children:
            assert child.stdin is not None
            child.stdin.write(struct.pack("<d", begin))
        stopping = asyncio.ensure_future(_stop(children, stop))
        try:
            results = await asyncio.gather(*(_collect(child, on_done) for child in children))
        finally:
            stopping.cancel()
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()
    records = sorted((record for result in results for record in result.records), key=lambda record: record.index)
    return LoadResult(begin, records, sum(result.cpu_seconds for result in results))


async def _stop(children: list[asyncio.subprocess.Process], stop: asyncio.Event) -> None:
    await stop.wait()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()


async def _collect(child: asyncio.subprocess.Process, on_done: Callable[[], None]) -> LoadResult:
    assert child.stdout is not None
    while (byte := await child.stdout.read(1)) == b".":
        on_done()
    packed = await child.stdout.read()
    await child.wait()
    if byte != b"\n" or child.returncode:
        raise HeadwayError(f"a process of the load generator died with status {child.returncode}")
    return msgspec.msgpack.decode(packed, type=LoadResult)
