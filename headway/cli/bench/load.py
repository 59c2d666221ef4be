"""The load generator: sends planned requests when they are due and notes when each piece of each answer arrives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, Final

import msgspec

from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address, EventSplitter, TransportError, error_text
from headway.core.errors import HeadwayError

MAX_REFUSAL_BYTES: Final = 4096


class Planned(msgspec.Struct, array_like=True):
    """A request to send ``at`` seconds after the start.

    Attributes:
        index: its place in the run.
        body: JSON.
    """

    index: int
    at: float
    body: bytes


class Plan(msgspec.Struct, array_like=True):
    """What one process sends, and where to.

    Attributes:
        url, path, headers: of the server's endpoint.
        max_concurrency: most requests open at once; None for no limit.
        timeout: seconds after which a request has failed.
        keep_texts: whether records shall hold the answers.
    """

    url: str
    path: str
    headers: dict[str, str]
    requests: list[Planned]
    max_concurrency: int | None
    timeout: float
    keep_texts: bool = False


class Record(msgspec.Struct, array_like=True):
    """What became of one request. Times in seconds of ``perf_counter``, which all processes of a machine share.

    Attributes:
        due: when it should have been sent. start: when it was.
        ttft: seconds from start to the first piece. itl: between pieces. latency: to the last piece.
        num_chunks: pieces, each of one token or more.
        output_tokens: generated; as the server's usage says, else the token ids it sent, else one a piece.
        prompt_tokens: as the server's usage says.
        counted: output_tokens is the server's word.
        error: why it failed.
        text: the answer, where the plan keeps it.
    """

    index: int
    due: float = 0.0
    start: float = 0.0
    ttft: float = 0.0
    itl: list[float] = []
    latency: float = 0.0
    num_chunks: int = 0
    output_tokens: int = 0
    prompt_tokens: int | None = None
    counted: bool = False
    error: str | None = None
    text: str = ""


class LoadResult(msgspec.Struct, array_like=True):
    """What came of a plan.

    Attributes:
        begin: ``perf_counter`` time from which the requests' times counted.
        cpu_seconds: processor time it took.
    """

    begin: float
    records: list[Record]
    cpu_seconds: float


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Call:
    """Follows one answer."""

    __slots__ = ("_keeps_text", "_last", "_refusal", "_splitter", "_tokens", "done", "record", "usage")

    def __init__(self, record: Record, keeps_text: bool) -> None:
        self.record = record
        self._keeps_text = keeps_text
        self._splitter = EventSplitter()
        self._refusal = b""
        self._last = self._tokens = 0.0
        self.usage: _Usage | None = None
        self.done = False

    def take(self, status: int, data: bytes, now: float) -> None:
        """A piece of the body, read at ``now``."""
        if status != 200:
            self._refusal += data[: MAX_REFUSAL_BYTES - len(self._refusal)]
            return
        for event in self._splitter.feed(data):
            if event == b"[DONE]":
                self.done = True
            else:
                self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"an event is not a chunk of a completion: {error}") from None
        if chunk.error is not None:
            self.record.error = error_text(event)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices or not _brings_tokens(chunk.choices[0]):
            return
        record = self.record
        if record.num_chunks == 0:
            record.ttft = now - record.start
        else:
            record.itl.append(now - self._last)
        self._last = now
        record.num_chunks += 1
        if self._keeps_text:
            record.text += _text(chunk.choices[0])
        token_ids = chunk.choices[0].token_ids
        self._tokens += 1 if token_ids is None else len(token_ids)

    def finish(self, status: int) -> None:
        """The answer has ended well as HTTP; see whether it is one."""
        record = self.record
        if status != 200:
            record.error = f"HTTP {status}: {error_text(self._refusal)}"
        elif record.error is None and not self.done:
            record.error = "the stream ended without [DONE]"
        elif record.error is None and record.num_chunks == 0:
            record.error = "the answer holds no token"
        record.latency = self._last - record.start if record.num_chunks else 0.0
        usage = self.usage
        record.counted = usage is not None and usage.completion_tokens is not None
        record.output_tokens = int(self._tokens)
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.output_tokens = record.output_tokens if usage.completion_tokens is None else usage.completion_tokens


def _brings_tokens(choice: _Choice) -> bool:
    """Every chunk with a choice counts, as in vLLM, but a chat's opening one: a role alone comes before any token."""
    delta = choice.delta
    opening = delta is not None and delta.role is not None and not (delta.content or delta.reasoning_content)
    return not opening or bool(choice.token_ids) or choice.finish_reason is not None


def _text(choice: _Choice) -> str:
    return choice.text or (choice.delta.content if choice.delta is not None else None) or ""


def quieten() -> None:
    """Collect garbage now and not again: a pause of the collector would be taken for the server's."""
    gc.collect()
    gc.disable()


async def run(
    plan: Plan,
    begin: float | None = None,
    on_done: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Send everything. Failures are recorded, not raised.

    Args:
        begin: ``perf_counter`` time from which ``at`` counts; None: as soon as all is ready.
        on_done: called whenever a request ends.
        stop: when it is set, open requests are given up; the result holds those that have ended.
    """
    client = HttpClient(Address.parse(plan.url), plan.headers)
    gate = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency is not None else contextlib.nullcontext()
    tasks: list[asyncio.Task[Record]] = []
    quieten()
    cpu = process_time()
    begin = perf_counter() if begin is None else begin

    async def send_all() -> None:
        for planned in plan.requests:
            delay = begin + planned.at - perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            record = Record(planned.index, due=begin + planned.at)
            task = asyncio.ensure_future(_send(client, plan, planned, record, gate))
            task.add_done_callback(lambda _: on_done())
            tasks.append(task)
        await asyncio.gather(*tasks)

    stopped = asyncio.ensure_future(stop.wait() if stop is not None else asyncio.Event().wait())
    sending = asyncio.ensure_future(send_all())
    try:
        await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
        records = [task.result() for task in tasks if task.done()]
        return LoadResult(begin, records, process_time() - cpu)
    finally:
        gc.enable()
        on_done = _nothing
        for each in (stopped, sending, *tasks):
            each.cancel()
        await asyncio.gather(stopped, sending, *tasks, return_exceptions=True)
        await client.close()


def _nothing() -> None:
    """What ends after the run counts no more."""


async def _send(client: HttpClient, plan: Plan, planned: Planned, record: Record, gate: Any) -> Record:
    request = client.address.request("POST", plan.path, client.headers, planned.body)
    async with gate:
        record.start = perf_counter()
        call = _Call(record, plan.keep_texts)
        try:
            async with asyncio.timeout(plan.timeout):
                parser = await client.exchange(request, call.take)
            call.finish(parser.status)
        except TimeoutError:
            record.error = f"no end after {plan.timeout:g} s"
        except HeadwayError as error:
            record.error = record.error or str(error)
    return record
