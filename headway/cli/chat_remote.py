"""The other end of ``headway chat --url``: any server that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import fields, replace
from time import perf_counter
from typing import Any

from headway.cli.http_client import HttpClient
from headway.cli.http_wire import Address, TransportError, error_text
from headway.cli.streaming import Answer
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, RequestFailedError

PATH = "/v1/chat/completions"


class RemoteSpeaker:
    """Asks a server for each answer.

    Args:
        url: with or without the /v1 at its end.
        engine: as the command line gave them; all but the model's name are the server's business.
        sampling: fields of the requests, by the names of SamplingParams.

    Raises:
        ConfigError: an engine option was given, or no model can be named.
        StatusError, TransportError: the server cannot be asked for its models.
    """

    def __init__(self, url: str, api_key: str | None, engine: EngineArgs, sampling: dict[str, Any]) -> None:
        refuse_engine_options(engine)
        address = Address.parse(url)
        self._address = replace(address, prefix=address.prefix.removesuffix("/v1"))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sampling = {name: value for name, value in sampling.items() if name != "n"}
        self._model = engine.model if engine.model != EngineArgs().model else asyncio.run(self._first_model())
        self.name = f"{self._model} at {self._address}"

    async def _first_model(self) -> str:
        client = HttpClient(self._address, self._headers)
        try:
            listed = await client.json("GET", "/v1/models")
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{self._address} names no model; give one with --model") from None
        finally:
            await client.close()

    async def answer(self, messages: list[dict[str, str]], answer: Answer) -> None:
        """Stream one answer into ``answer`` and to stdout.

        Raises:
            StatusError, TransportError, RequestFailedError: the server refused, or broke off.
        """
        client = HttpClient(self._address, self._headers)
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        start = perf_counter()
        try:
            async with contextlib.aclosing(client.events(PATH, body)) as events:
                async for event in events:
                    _take(event, answer, start)
        finally:
            await client.close()

    def check(self) -> None:
        """Nothing here can die with a server: the next question finds out."""

    async def figures(self) -> list[str]:
        """Servers keep their figures to themselves; ours has them at /metrics."""
        return []


def _take(event: bytes, answer: Answer, start: float) -> None:
    try:
        chunk = json.loads(event)
        choices, usage = chunk.get("choices") or [], chunk.get("usage") or {}
        if chunk.get("error"):
            raise RequestFailedError(error_text(event))
        for choice in choices:
            text = (choice.get("delta") or {}).get("content") or ""
            if text and answer.first_token is None:
                answer.first_token = perf_counter() - start
            answer.num_tokens += bool(text)
            answer.texts[0] += text
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            sys.stdout.write(text)
        answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)
        answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
    except (ValueError, AttributeError, TypeError) as error:
        raise TransportError(f"an event is not a chunk of a chat: {error}") from None
    sys.stdout.flush()
    answer.seconds = perf_counter() - start


def refuse_engine_options(engine: EngineArgs) -> None:
    """An option for an engine of our own says nothing to a server, so it is refused rather than dropped."""
    default = EngineArgs()
    given = [f.name for f in fields(EngineArgs) if getattr(engine, f.name) != getattr(default, f.name)]
    flags = [f"--{name.replace('_', '-')}" for name in given if name != "model"]
    if flags:
        raise ConfigError(f"{', '.join(flags)} cannot go with --url: the engine is the server's")
