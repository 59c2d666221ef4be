"""``headway chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

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
    *,
    engine: EngineArgs,
    sampling: dict[str, Any],
) -> None:
    """Talk to a model. Type /help for what you can type."""
    llm = start_engine(engine)
    try:
        if not llm.has_chat_template:
            raise InvalidRequestError("the model has no chat template; use headway generate --no-chat")
        sampling["n"] = 1
        conversation = Conversation(llm, merge_params(llm, sampling, max_tokens=None), system, stats)
        if sys.stdin.isatty():
            typer.echo(f"{llm.model_info.model} on {llm.model_info.device}. {HELP}", err=True)
        conversation.run()
    finally:
        llm.shutdown()


class Conversation:
    """Turns of one conversation. Answers go to stdout, everything else to stderr."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None, stats: bool) -> None:
        self._llm, self._params, self._system, self._stats = llm, params, system, stats
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def run(self) -> None:
        """Read and answer until end of input."""
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
        outputs = self._llm.chat(self.messages, self._params, delta=True)
        try:
            asyncio.run(stream_answer(outputs, answer, show=True))
        except KeyboardInterrupt:
            answer.finish_reason = "abort"
        except HeadwayError as error:
            self.messages.pop()
            self._llm.check_health()
            typer.echo(f"headway: {error} (/reset begins a new conversation)", err=True)
            return
        typer.echo()
        self.messages.append({"role": "assistant", "content": answer.texts[0]})
        if self._stats:
            typer.echo(f"({answer.line()})", err=True)
