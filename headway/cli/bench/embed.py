"""``headway bench embed``: texts per second of a model that pools, offline or from a server with many clients."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, Final

import typer

from headway.cli.bench.offline import random_prompts
from headway.cli.errors import clean_errors
from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address, StatusError, error_text
from headway.cli.options import engine_kwargs, with_options
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.task import Task

WORDS: Final = tuple(
    """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city name team minute idea body back parent face
    others level office door health person art
    """.split()  # noqa: SIM905 - a list of strings would be a page long
)
"""Common English words, one token each in most vocabularies."""
LENGTHS: Final = (32, 128, 512)
SPECIAL_TOKENS: Final = 2
"""What a tokenizer adds to a text, about."""


def random_texts(rng: random.Random, count: int, length: int) -> list[str]:
    """``count`` texts of about ``length`` tokens, special ones included."""
    return [" ".join(rng.choices(WORDS, k=max(1, length - SPECIAL_TOKENS))) for _ in range(count)]


@clean_errors
@with_options(sampling=False, default="minilm")
def embed(
    input_len: Annotated[
        list[int] | None,
        typer.Option("--input-len", help="Tokens of a text; may be repeated.", show_default="32 128 512"),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Texts of each length.")] = 1000,
    text: Annotated[
        bool, typer.Option("--text", help="Offline: words that have to be tokenised, not token ids.")
    ] = False,
    base_url: Annotated[str | None, typer.Option("--base-url", help="Ask a server there, and start none.")] = None,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", min=1, help="Clients of the server.")] = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts in one request to the server.")] = 1,
    output_json: Annotated[
        Path | None, typer.Option("--output-json", help="Also write the figures to this file.")
    ] = None,
    *,
    engine: EngineArgs,
) -> None:
    """Texts per second by their length. With --base-url also the milliseconds a request takes."""
    lengths = input_len or list(LENGTHS)
    if min(lengths) < 1:
        raise ConfigError(f"--input-len must be at least 1; got {min(lengths)}")
    if base_url is not None:
        rows = asyncio.run(
            _online(Address.parse(base_url), lengths, num_prompts, max_concurrency, batch_size, engine.seed)
        )
    else:
        rows = _offline(engine, lengths, num_prompts, text)
    if output_json is not None:
        output_json.write_text(json.dumps(rows, indent=4) + "\n", encoding="utf-8")


def _offline(engine: EngineArgs, lengths: list[int], count: int, text: bool) -> list[dict[str, Any]]:
    from headway import LLM

    rng, rows = random.Random(engine.seed), []
    with LLM(**engine_kwargs(engine)) as llm:
        info = llm.model_info
        task = info.tasks[0]
        if not task.pools or task is Task.SCORE:
            raise ConfigError(f"{info.model} serves {task.value}; give a model that makes embeddings, or a classifier")
        for length in lengths:
            if length > info.max_model_len:
                raise ConfigError(f"--input-len {length} is longer than max_model_len={info.max_model_len}")
            prompts: list[Any] = (
                list(random_texts(rng, count, length))
                if text
                else list(random_prompts(rng, count, length, info.vocab_size))
            )
            llm.encode(prompts[:16], pooling_task=task, use_tqdm=False)
            before, start, work = llm.stats(), perf_counter(), process_time()
            outputs = llm.encode(prompts, pooling_task=task, use_tqdm=False)
            seconds, busy = perf_counter() - start, process_time() - work
            after = llm.stats()
            tokens = sum(len(output.prompt_token_ids) for output in outputs)
            host = sum(getattr(after, n) - getattr(before, n) for n in HOST_SECONDS)
            rows.append(
                {
                    "input_len": length,
                    "num_prompts": count,
                    "elapsed_time": seconds,
                    "requests_per_second": count / seconds,
                    "tokens_per_second": tokens / seconds,
                    "num_steps": after.num_steps - before.num_steps,
                    "engine_host_us_per_request": host / count * 1e6,
                    "process_us_per_request": busy / count * 1e6,
                }
            )
            typer.echo(
                f"{length:>6} tokens: {count / seconds:>10.1f} requests/s {tokens / seconds:>12.0f} tokens/s "
                f"{host / count * 1e6:>8.1f} us of the engine's host work a request"
            )
    return rows


HOST_SECONDS: Final = ("schedule_seconds", "launch_seconds", "apply_seconds")


async def _online(
    address: Address, lengths: list[int], count: int, clients: int, batch: int, seed: int
) -> list[dict[str, Any]]:
    import os

    key = os.environ.get("OPENAI_API_KEY")
    client = HttpClient(address, {"Authorization": f"Bearer {key}"} if key else {})
    rng, rows = random.Random(seed), []
    try:
        model = (await client.json("GET", "/v1/models"))["data"][0]["id"]
        for length in lengths:
            bodies = [random_texts(rng, min(batch, count - i), length) for i in range(0, count, batch)]
            requests = [
                address.request(
                    "POST", "/v1/embeddings", client.headers, json.dumps({"model": model, "input": texts}).encode()
                )
                for texts in bodies
            ]
            await _ask(client, requests[0])
            start, work = perf_counter(), process_time()
            latencies = await _clients(client, requests, clients)
            seconds, busy = perf_counter() - start, process_time() - work
            rows.append(_row(length, count, seconds, latencies, busy))
    finally:
        await client.close()
    return rows


async def _clients(client: HttpClient, requests: list[bytes], number: int) -> list[float]:
    """Seconds of each request, ``number`` of them open at any time."""
    left, latencies = iter(requests), []

    async def one() -> None:
        for request in left:
            start = perf_counter()
            await _ask(client, request)
            latencies.append(perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(number, len(requests))):
            group.create_task(one())
    return latencies


async def _ask(client: HttpClient, request: bytes) -> None:
    status, body = await client.collect(request)
    if status != 200:
        raise StatusError(status, error_text(body))


def _row(length: int, count: int, seconds: float, latencies: list[float], busy: float) -> dict[str, Any]:
    import numpy as np

    p50, p99 = (float(np.percentile(latencies, percent)) * 1e3 for percent in (50, 99))
    typer.echo(
        f"{length:>6} tokens: {count / seconds:>10.1f} texts/s, a request p50 {p50:.1f} ms, p99 {p99:.1f} ms "
        f"(this client was busy {busy / seconds:.0%})"
    )
    sys.stdout.flush()
    return {
        "input_len": length,
        "num_prompts": count,
        "elapsed_time": seconds,
        "texts_per_second": count / seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "client_busy": busy / seconds,
    }
