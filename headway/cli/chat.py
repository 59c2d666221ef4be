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

HELP = """\
/reset, /clear    begin a new conversation
/system TEXT      begin a new one with this system message; without TEXT: show it
/stats            figures of this conversation; /stats on and /stats off: a line after each answer
/help             this
/quit, /exit      leave; so does Ctrl-D
Ctrl-C stops an answer. A line that begins with // is sent with one slash."""
GREETING = "/help shows the commands, Ctrl-C stops an answer, /quit or Ctrl-D leaves."


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

    async def figures(self) -> list[str]:
        """Lines about the engine, for ``/stats``; [] where it tells nothing."""
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

    async def figures(self) -> list[str]:
        stats, info = await self._llm.stats(), self._llm.model_info
        share = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
        return [
            f"engine: {info.architecture} in {info.dtype} on {info.device}, context {info.max_model_len} tokens",
            f"{stats.num_steps} steps, {stats.prompt_tokens} prompt tokens ({share:.0%} found in the prefix cache), "
            f"{stats.generation_tokens} generated, {stats.kv_cache_usage:.0%} of the KV cache in use",
        ]


class Conversation:
    """Turns of one conversation. Answers go to stdout, everything else to stderr."""

    def __init__(self, speaker: Speaker, system: str | None, stats: bool) -> None:
        self._speaker, self._system, self._stats = speaker, system, stats
        self.messages: list[dict[str, str]] = []
        self._answers: list[Answer] = []
        """Of this conversation; what was interrupted, too."""
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._answers = []

    def run(self) -> None:
        """Read and answer until end of input."""
        if sys.stdin.isatty():
            typer.echo(f"{self._speaker.name}. {GREETING}", err=True)
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                typer.echo("\n(/quit or Ctrl-D leaves)", err=True)
                continue
            if line is None or line in ("/quit", "/exit"):
                return
            if line.startswith("/") and not line.startswith("//"):
                word, _, rest = line.partition(" ")
                self._command(word, rest.strip())
            elif line:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _command(self, word: str, rest: str) -> None:
        """One line that begins with a slash."""
        if word in ("/reset", "/clear") and not rest:
            self.reset()
            typer.echo("(new conversation)", err=True)
        elif word == "/system" and rest:
            self._system = rest
            self.reset()
            typer.echo("(new conversation with this system message)", err=True)
        elif word == "/system":
            typer.echo(f"(system message: {self._system or 'none'})", err=True)
        elif word == "/stats" and rest in ("on", "off"):
            self._stats = rest == "on"
            typer.echo(f"(figures after each answer: {rest})", err=True)
        elif word == "/stats" and not rest:
            typer.echo("\n".join(self._figures()), err=True)
        else:
            if word != "/help":
                typer.echo(f"(there is no command {word[:40]!r}{' with ' + repr(rest[:40]) if rest else ''})", err=True)
            typer.echo(HELP, err=True)

    def _figures(self) -> list[str]:
        answers = self._answers
        if answers:
            tokens, seconds = sum(a.num_tokens for a in answers), sum(a.seconds for a in answers)
            speed = tokens / max(seconds, 1e-9)
            lines = [
                f"this conversation: {len(answers)} answers, {tokens} tokens in {seconds:.2f} s ({speed:.2f} tok/s)",
                f"last answer: {answers[-1].line()}",
            ]
        else:
            lines = ["this conversation: no answer yet"]
        return lines + asyncio.run(self._speaker.figures())

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
        self._answers.append(answer)
        if self._stats:
            typer.echo(f"({answer.line()})", err=True)
