"""``headway bench serve``: load on any OpenAI-compatible server, with vLLM's flags and labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, Final

import typer

from headway.cli.bench import drafts, metrics
from headway.cli.bench.datasets import Item, arrivals, make_items, rates, request_body
from headway.cli.bench.flags import takes
from headway.cli.bench.load import LoadResult, Plan, Planned, run
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.bench.workers import run_workers
from headway.cli.errors import clean_errors
from headway.cli.http_client import HttpClient
from headway.cli.http_wire import StatusError, TransportError, error_text
from headway.core.errors import ConfigError, RequestFailedError

RETRY_SECONDS: Final = 0.5
SPARE_FILES: Final = 64
LINE_SECONDS: Final = 5.0


@clean_errors
@takes(ServeArgs)
def serve(args: ServeArgs) -> None:
    """Send requests to an OpenAI-compatible server and measure its answers."""
    found = asyncio.run(measure(args, show=True))
    typer.echo(metrics.block(found, settings_of(args)))
    for note in metrics.warnings(found, args.num_workers):
        typer.echo(f"headway: {note}", err=True)
    ended = found["completed"] + found["failed"]
    if ended < args.num_prompts:
        typer.echo(
            f"headway: interrupted: these are the {ended} of {args.num_prompts} requests that had ended", err=True
        )
    if args.save_result or args.append_result:
        typer.echo(f"wrote {save(args, found)}", err=True)
    if ended < args.num_prompts:
        raise typer.Exit(130)
    if found["failed"]:
        raise typer.Exit(1)


def settings_of(args: ServeArgs) -> metrics.Settings:
    """What the figures depend on besides the records."""
    return metrics.Settings(
        args.request_rate, args.max_concurrency, args.metrics(), args.percentiles(), args.limits_ms()
    )


async def measure(args: ServeArgs, show: bool) -> dict[str, Any]:
    """Run it all: the server's readiness, warm-up, load, figures. Ctrl-C during the load ends it with what has come so far.

    Args:
        show: progress on stderr.

    Raises:
        RequestFailedError: the server is not ready, or fails the requests before the measurement.
        ConfigError: the options ask for what cannot be.
    """
    items = make_items(args)
    client = HttpClient(args.address(), args.headers())
    try:
        model = await _ready_model(args, client, show)
        bodies = [request_body(args, model, item) for item in items]
        if args.ready_check_timeout_sec:
            await _until_ready(args, lambda: _probe(args, bodies[0]), show)
    finally:
        await client.close()
    if args.num_warmups:
        warmup = [Planned(i, 0.0, bodies[i % len(bodies)]) for i in range(args.num_warmups)]
        result = await run(_plan(args, warmup, args.max_concurrency))
        errors = [record.error for record in result.records if record.error is not None]
        if errors:
            raise RequestFailedError(f"{len(errors)} of {args.num_warmups} warm-up requests failed: {errors[0]}")
    times = arrivals(rates(args), args.burstiness, args.seed)
    planned = [Planned(i, time, body) for i, (time, body) in enumerate(zip(times, bodies))]
    _allow_sockets(len(planned) if args.max_concurrency is None else args.max_concurrency)
    before = await _drafts(args)
    result = await _run_load(args, planned, show and not args.disable_tqdm)
    found, after = _figures(args, model, items, result), await _drafts(args)
    return found if after is None else found | after.since(before).figures()


async def _drafts(args: ServeArgs) -> drafts.DraftCounts | None:
    client = HttpClient(args.address(), args.headers())
    try:
        return await drafts.asked(client)
    finally:
        await client.close()


def _figures(args: ServeArgs, model: str, items: list[Item], result: LoadResult) -> dict[str, Any]:
    rate: float | str = "inf" if math.isinf(args.request_rate) else args.request_rate
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": len(items),
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        found |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    sizes = [item.num_tokens for item in items]
    found |= metrics.figures(result.records, sizes, result.begin, settings_of(args))
    if args.save_detailed:
        found["detailed"] = metrics.detailed(result.records, sizes)
    found["client_cpu_seconds"] = result.cpu_seconds
    found["client_busy"] = result.cpu_seconds / max(found["duration"] * args.num_workers, 1e-9)
    return found


async def _ready_model(args: ServeArgs, client: HttpClient, show: bool) -> str:
    """The name to ask for."""
    if args.model is not None:
        return args.model
    found: list[str] = []

    async def ask() -> None:
        listed = await client.json("GET", "/v1/models")
        try:
            found.append(str(listed["data"][0]["id"]))
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{client.address}/v1/models names no model; give --model") from None

    await _until_ready(args, ask, show)
    return found[0]


async def _probe(args: ServeArgs, body: bytes) -> None:
    """One request as those to come. Raises StatusError or TransportError."""
    client = HttpClient(args.address(), args.headers())
    try:
        status, text = await client.collect(client.address.request("POST", args.path, client.headers, body))
    finally:
        await client.close()
    if status != 200:
        raise StatusError(status, error_text(text))


async def _until_ready(args: ServeArgs, attempt: Callable[[], Awaitable[None]], show: bool) -> None:
    """Try until it works. A refusal that waiting cannot mend ends at once."""
    end = monotonic() + args.ready_check_timeout_sec
    told = False
    while True:
        try:
            await attempt()
        except (StatusError, TransportError) as error:
            passing = isinstance(error, TransportError) or error.status in (429, 502, 503, 504)
            if not passing or monotonic() + RETRY_SECONDS > end:
                raise RequestFailedError(f"the server is not ready: {error}") from None
            if show and not told:
                told = True
                typer.echo(f"waiting for {args.address()} ({error})", err=True)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return


def _plan(args: ServeArgs, requests: list[Planned], max_concurrency: int | None) -> Plan:
    url, timeout = str(args.address()), float(args.request_timeout_sec)
    return Plan(url, args.path, args.headers(), requests, max_concurrency, timeout, args.save_detailed)


async def _run_load(args: ServeArgs, planned: list[Planned], show: bool) -> LoadResult:
    with _progress(len(planned), show) as advance, _interruptible() as stop:
        if args.num_workers == 1:
            return await run(_plan(args, planned, args.max_concurrency), on_done=advance, stop=stop)
        count = min(args.num_workers, len(planned))
        total = args.max_concurrency
        shares = [None if total is None else total // count + (i < total % count) for i in range(count)]
        plans = [_plan(args, planned[i::count], share) for i, share in enumerate(shares)]
        return await run_workers(plans, advance, stop)


@contextlib.contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the second interrupts as ever."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[], None]]:
    """A bar over finished requests on a terminal, elsewhere a line now and then."""
    if not show:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield Lines(total).advance
        return
    from tqdm import tqdm

    with tqdm(total=total, dynamic_ncols=True) as bar:
        yield lambda: bar.update() and None


class Lines:
    """Progress for a pipe or a file: a line when a tenth more has ended, and at most every five seconds one for less.

    Args:
        total: requests.
        write: takes the lines.
        clock: seconds.
    """

    def __init__(
        self,
        total: int,
        write: Callable[[str], object] = lambda line: typer.echo(line, err=True),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._total, self._write, self._clock = total, write, clock
        self._done = self._told = 0
        self._begin = self._last = clock()

    def advance(self) -> None:
        """One more request has ended."""
        self._done += 1
        now = self._clock()
        tenth = self._done * 10 // self._total > self._told * 10 // self._total
        if tenth or now - self._last >= LINE_SECONDS:
            self._write(f"{self._done} of {self._total} requests after {now - self._begin:.1f} s")
            self._told, self._last = self._done, now


def _allow_sockets(count: int) -> None:
    """Raise this process's limit on open files as far as ``count`` connections need and the system lets us.

    Raises:
        ConfigError: it does not let us.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"{count} connections need {wanted} open files, and the system allows {hard}; use --max-concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def save(args: ServeArgs, found: dict[str, Any]) -> Path:
    """Write the figures; gives the file's path. Lines that are added hold one result each."""
    model = str(found["model_id"]).rstrip("/").split("/")[-1]
    default = f"{args.label or args.backend}-{found['request_rate']}qps-{model}-{found['date']}.json"
    path = (args.result_dir or Path()) / (args.result_filename or default)
    path.parent.mkdir(parents=True, exist_ok=True)
    detailed = found["detailed"] if args.save_detailed else {}
    written = args.notes() | {name: value for name, value in found.items() if name != "detailed"} | detailed
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(json.dumps(written, indent=None if args.append_result else 1) + "\n")
    return path
