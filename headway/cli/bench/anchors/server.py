"""The server: ``headway serve`` as a process of its own, under the load of ``headway bench serve``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headway.cli.bench import metrics
from headway.cli.bench.anchors.context import Bench
from headway.cli.bench.anchors.structured import OFFLINE_LOAD
from headway.cli.bench.online import measure as bench_serve
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address, StatusError, TransportError
from headway.core.errors import RequestFailedError

START_TIMEOUT: Final = 180.0
STOP_TIMEOUT: Final = 30.0
POLL_SECONDS: Final = 0.05
FIGURES: Final = {
    "req_s": ("request_throughput", "req/s", "higher"),
    "tok_s": ("output_throughput", "tok/s", "higher"),
    "ttft_p50_ms": ("median_ttft_ms", "ms", "lower"),
    "ttft_p99_ms": ("p99_ttft_ms", "ms", "lower"),
    "itl_p50_ms": ("median_itl_ms", "ms", "lower"),
    "itl_p99_ms": ("p99_itl_ms", "ms", "lower"),
}
"""Figure -> the load generator's name of it, unit, which is better."""
SHARE: Final = "server_over_offline_pct"


def figure_name(rate: float, figure: str) -> str:
    """``figure`` at ``rate`` requests per second."""
    return f"server_{rate:g}_{figure}"


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    names = []
    for figure, (_, unit, better) in FIGURES.items():
        found = [figure_name(rate, figure) for rate in bench.scale.rates]
        bench.table.announce(found, unit, better)
        names += found
    cpu = [figure_name(rate, "frontend_cpu_ms") for rate in bench.scale.rates]
    bench.table.announce(cpu, "ms of processor time a request")
    bench.table.announce(["server_start_s"], "s")
    bench.table.announce([SHARE], "% of offline tok/s", "higher")
    return [*names, *cpu, "server_start_s", SHARE]


def measure(bench: Bench) -> None:
    """Start it once, then each rate in turn."""
    names = announce(bench)
    if not bench.table.wants(*names):
        return
    bench = bench.with_vocabulary(bench.scale.vocab_49k)
    with bench.table.measuring(names), running(bench) as (port, process, start_seconds):
        bench.table.add("server_start_s", start_seconds)
        asyncio.run(bench_serve(_args(bench, port, float("inf"), min(64, bench.scale.load[0])), show=False))
        for run in range(bench.runs):
            for rate in bench.scale.rates:
                wanted = [figure_name(rate, figure) for figure in (*FIGURES, "frontend_cpu_ms")]
                if not bench.table.wants(*wanted):
                    continue
                with bench.table.measuring(wanted):
                    _one(bench, _args(bench, port, rate, bench.scale.load[0], seed=run), process, wanted)
        online, offline = (bench.table.value(name) for name in (figure_name(float("inf"), "tok_s"), OFFLINE_LOAD))
        if online and offline:
            bench.table.add(SHARE, online / offline * 100)


def _args(bench: Bench, port: int, rate: float, count: int, seed: int = 0) -> ServeArgs:
    return ServeArgs(
        port=port, num_prompts=count, random_input_len=bench.scale.load[1], random_output_len=bench.scale.load[2],
        random_vocab_size=min(10_000, bench.scale.vocab_49k), request_rate=rate, ignore_eos=True, seed=seed,
        ready_check_timeout_sec=10,
    )  # fmt: skip


def _one(bench: Bench, args: ServeArgs, process: subprocess.Popen[bytes], names: list[str]) -> None:
    before = processor_seconds(process.pid)
    found: dict[str, Any] = asyncio.run(bench_serve(args, show=False))
    after = processor_seconds(process.pid)
    count, output = args.num_prompts, args.random_output_len
    if found["failed"] or found["total_output_tokens"] != count * output:
        raise RequestFailedError(
            f"{found['failed']} of {count} requests failed, {found['total_output_tokens']} of {count * output} tokens "
            f"came: {found['errors']}"
        )
    notes = metrics.warnings(found, args.num_workers)
    if args.request_rate < float("inf"):  # a server that is never behind does not reach the rate either
        sent, drained = found["last_start"], found["duration"] - found["last_start"]
        notes.append(f"the last request was sent after {sent:.2f} s, the last answer took {drained:.2f} s more")
    for name, (key, _, _) in zip(names, FIGURES.values()):
        bench.table.add(name, found[key], "; ".join(notes))
    if before is not None and after is not None:
        bench.table.add(names[-1], (after - before) / count * 1e3)


def processor_seconds(pid: int) -> float | None:
    """User and system time of one process, its children not counted (the engine is one); None where /proc is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(bench: Bench, port: int) -> list[str]:
    """How the server is started."""
    flags = [sys.executable, "-m", "headway", "serve", str(bench.folder), "--port", str(port)]
    for name, value in {**bench.engine, "tokenizer": bench.tokenizer}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


@contextmanager
def running(bench: Bench) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """A server on a free port: the port, its process, the seconds it took to be healthy.

    Raises:
        RequestFailedError: it did not come up; with the end of what it said.
    """
    port, log = free_port(), bench.work / "server.log"
    start = time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(command(bench, port), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            asyncio.run(_until_healthy(process, port, log))
            yield port, process, time.perf_counter() - start
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; insist if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    client = HttpClient(Address("127.0.0.1", port))
    end = time.monotonic() + START_TIMEOUT
    try:
        while True:
            if process.poll() is not None:
                raise RequestFailedError(f"the server ended with status {process.returncode}: {_end_of(log)}")
            try:
                status, _ = await client.collect(client.address.request("GET", "/ready", {}))
                if status == 200:
                    return
            except (StatusError, TransportError):
                pass
            if time.monotonic() > end:
                raise RequestFailedError(f"the server was not healthy after {START_TIMEOUT:g} s: {_end_of(log)}")
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await client.close()


def _end_of(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace")[-400:].split()) or "(it said nothing)"


def free_port() -> int:
    """A port that is free just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
