"""``headway chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from headway.cli.options import with_options
from headway.cli.streaming import Answer, merge_params, start_engine, stream_answer
from headway.core.config import EngineArgs
from headway.core.errors import HeadwayError, InvalidRequestError

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM
    from headway.core.params import SamplingParams

HELP = "/reset begins a new conversation, /help shows this, Ctrl-C stops an answer, Ctrl-D (or /exit) leaves."


@with_options(sampling=True)
def chat(
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message to begin with.")] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Show figures after each answer.")] = True,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk to this OpenAI-compatible server; MODEL is then its name there.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="For --url.")
    ] = None,
    *,
    engine: EngineArgs,
    sampling: dict[str, Any],
) -> None:
    """Talk to a model. Type /help for what you can type."""
    if url is not None:
        from headway.cli.chat_remote import RemoteSpeaker

        Conversation(RemoteSpeaker(url, api_key, engine, sampling), system, stats).run()
        return
    llm = start_engine(engine)
    try:
        if not llm.has_chat_template:
            raise InvalidRequestError("the model has no chat template; use headway generate --no-chat")
        sampling["n"] = 1
        params = merge_params(llm, sampling, max_tokens=None)
        Conversation(LocalSpeaker(llm, params), system, stats).run()
    finally:
        llm.shutdown()


class Speaker(Protocol):
    """Who answers.

    Attributes:
        name: for the greeting.
    """

    @property
    def name(self) -> str: ...

    async def answer(self, messages: list[dict[str, str]], answer: Answer) -> None:
        """Stream the next message of a conversation into ``answer`` and to stdout."""
        ...

    def check(self) -> None:
        """After a failed answer: raises if no other can be had."""
        ...


class LocalSpeaker:
    """An engine of our own."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self.name = f"{llm.model_info.model} on {llm.model_info.device}"

    async def answer(self, messages: list[dict[str, str]], answer: Answer) -> None:
        await stream_answer(self._llm.chat(messages, self._params, delta=True), answer, show=True)

    def check(self) -> None:
        self._llm.check_health()


class Conversation:
    """Turns of one conversation. Answers go to stdout, everything else to stderr."""

    def __init__(self, speaker: Speaker, system: str | None, stats: bool) -> None:
        self._speaker, self._system, self._stats = speaker, system, stats
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def run(self) -> None:
        """Read and answer until end of input."""
        if sys.stdin.isatty():
            typer.echo(f"{self._speaker.name}. {HELP}", err=True)
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                typer.echo("\n(Ctrl-D leaves)", err=True)
                continue
            if line is None or line == "/exit":
                return
            if line == "/reset":
                self.reset()
                typer.echo("(new conversation)", err=True)
            elif line.startswith("/"):
                typer.echo(HELP, err=True)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
        try:
            return input("> ").strip()
        except EOFError:
            typer.echo(err=True)
            return None

    def _answer(self, line: str) -> None:
        """One turn; what was said before an interrupt stays part of the conversation, a failed turn does not."""
        self.messages.append({"role": "user", "content": line})
        answer = Answer([""])
        try:
            asyncio.run(self._speaker.answer(self.messages, answer))
        except KeyboardInterrupt:
            answer.finish_reason = "abort"
        except HeadwayError as error:
            self.messages.pop()
            self._speaker.check()
            typer.echo(f"headway: {error} (/reset begins a new conversation)", err=True)
            return
        typer.echo()
        self.messages.append({"role": "assistant", "content": answer.texts[0]})
        if self._stats:
            typer.echo(f"({answer.line()})", err=True)
